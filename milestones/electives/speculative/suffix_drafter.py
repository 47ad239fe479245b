"""`SuffixDrafter`: guesses from all texts that it has seen, those of earlier requests too.

    texts     the cat sat on a mat        the cat sat on the sofa        the cat ran
    "the cat" was followed by      sat 2, ran 1        guess: sat, with a share of 2/3
    "cat sat" was followed by      on 2                guess: on, all of them
    "sat on"  was followed by      a 1, the 1          guess: the newer one, with a share of 1/2

The guesses end where the product of their shares is too small: a text that was always the same
gives many drafts, and one with many branches gives few. The method is suffix decoding
(arXiv:2411.04975), with a table of the last tokens in place of a suffix tree.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from common import Request

Tokens = tuple[int, ...]


class SuffixDrafter:
    """Counts which tokens followed the last 1 to `depth` tokens of any text."""

    def __init__(
        self, depth: int = 8, min_share: float = 0.1, most_contexts: int = 200_000
    ) -> None:
        """min_share: stop where a guess is less likely. most_contexts: the oldest are forgotten."""
        self.depth = depth
        self.min_share = min_share
        self.most_contexts = most_contexts
        self.followers: dict[Tokens, dict[int, int]] = {}  # the newest token of a context is last
        self.num_learnt: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def propose(self, request: Request, count: int) -> list[int]:
        self.learn(request)
        tokens, drafts, share = request.token_ids[-self.depth :], list[int](), 1.0
        while len(drafts) < count and (followers := self.longest_match(tokens)):
            # Of equal counts, the token that was seen last is the better guess.
            token = max(reversed(followers), key=followers.__getitem__)
            share *= followers[token] / sum(followers.values())
            if share < self.min_share:
                break
            drafts.append(token)
            tokens = [*tokens, token][-self.depth :]
        return drafts

    def learn(self, request: Request) -> None:
        """Count the tokens that are new since the last call for this request."""
        tokens = request.token_ids
        for end in range(self.num_learnt.get(request, 1), len(tokens)):
            for start in range(max(0, end - self.depth), end):
                context = tuple(tokens[start:end])
                followers = self.followers.pop(context, {})
                followers[tokens[end]] = followers.pop(tokens[end], 0) + 1
                self.followers[context] = followers  # now the newest entry
        self.num_learnt[request] = len(tokens)
        while len(self.followers) > self.most_contexts:
            del self.followers[next(iter(self.followers))]

    def longest_match(self, tokens: list[int]) -> dict[int, int]:
        """Return what followed the longest known end of a text; empty if none is known."""
        for start in range(len(tokens)):
            if followers := self.followers.get(tuple(tokens[start:])):
                return followers
        return {}
