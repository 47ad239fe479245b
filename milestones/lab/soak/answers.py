"""The expected answers: the output that each request must have, computed without an engine.

A `Source` continues a prompt as far as its answer is certain, without any stop. `ending` then cuts
the continuation where the request's parameters end it.

A continuation is certain up to the first token that rounding could change: two logits tie, or the
random number of a sampled token lies on the edge between two tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from common import LoadedModel, SamplingParams
from common.text.output_text import OutputText

from ..instruments.hash_chain import uniform
from ..instruments.hash_model import LOGIT, VOCAB_SIZE, HashChain, hash_model
from .extras import GrammarAnswers

EDGE = 1e-4  # share of a token's interval; nearer than that to its end, rounding may decide


@dataclass(frozen=True)
class Continuation:
    """The tokens after a prompt, and the log probability of each.

    is_whole: a grammar ends with the last token, so nothing can follow.
    """

    token_ids: list[int]
    logprobs: list[float]
    is_whole: bool = False

    def first(self, count: int) -> Continuation:
        """Return the first `count` tokens of it."""
        is_whole = self.is_whole and count >= len(self.token_ids)
        return Continuation(self.token_ids[:count], self.logprobs[:count], is_whole)


@dataclass(frozen=True)
class Ending:
    """The whole answer of a request."""

    token_ids: list[int]
    text: str
    finish_reason: str


class Source(ABC):
    """A model, and the answers that it must give."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.grammars = GrammarAnswers(loaded)

    @abstractmethod
    def continuation(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        adapter: str | None = None,
    ) -> Continuation:
        """Continue a prompt by up to `max_tokens` tokens, as far as they are certain.

        adapter: the folder of a LoRA adapter.
        """

    def allowed(self, params: SamplingParams, output: list[int]) -> list[int] | None:
        """Return the tokens that may follow an output. None: all of them."""
        wanted = params.structured_outputs
        return None if wanted is None else self.grammars.allowed(wanted, output)

    def is_whole(self, params: SamplingParams, output: list[int]) -> bool:
        """Return whether an output has a grammar, and ends with an end token."""
        ends = params.structured_outputs is not None and output[-1:]
        return bool(ends) and output[-1] in self.loaded.eos_token_ids

    def ending(
        self, token_ids: list[int], params: SamplingParams, limit: int | None = None
    ) -> Ending:
        """Cut a continuation where the parameters, or `limit` tokens, end it."""
        text = OutputText(self.loaded.tokenizer, params)
        most = min(params.max_tokens, limit or params.max_tokens)
        for count, token in enumerate(token_ids[:most], 1):
            is_eos = token in self.loaded.eos_token_ids and not params.ignore_eos
            if is_eos or token in params.stop_token_ids:
                text.finish()
                return Ending(token_ids[:count], text.visible, "stop")
            if text.append(token):
                return Ending(token_ids[:count], text.visible, "stop")
        reason = "stop" if text.finish() else "length"
        return Ending(token_ids[:most], text.visible, reason)

    def text_of(self, token_ids: list[int], params: SamplingParams) -> str:
        """Return the text of a request that ended after these tokens, by an abort for example."""
        text = OutputText(self.loaded.tokenizer, params)
        for token in token_ids:
            text.append(token)
        text.finish()
        return text.visible


class HashSource(Source):
    """The hash model. Its answers take some microseconds per token, so none is stored."""

    def __init__(self) -> None:
        super().__init__(hash_model())

    def continuation(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        adapter: str | None = None,
    ) -> Continuation:
        """Compute hashes in plain Python, and draw from the two values that logits may have."""
        assert adapter is None, "this model has no layer that an adapter could change"
        chain, tokens = HashChain(prompt), list[int]()
        total = math.exp(LOGIT) + VOCAB_SIZE - 1
        logprobs = []
        while len(tokens) < max_tokens and not self.is_whole(params, tokens):
            best = token = chain.next_token()
            allowed = self.allowed(params, tokens)
            if params.is_greedy and (params.has_penalties or allowed is not None):
                token = _most_likely(best, prompt, tokens, params, allowed)
            elif not params.is_greedy:
                drawn = _draw(best, params, chain.num_tokens, allowed)
                if drawn is None:
                    break
                token = drawn
            logprobs.append((LOGIT if token == best else 0.0) - math.log(total))
            tokens.append(token)
            chain.feed(token)
        return Continuation(tokens, logprobs, self.is_whole(params, tokens))


def _most_likely(
    best: int,
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    allowed: list[int] | None,
) -> int:
    """Return the most likely token after penalties and the mask. Of equals, the first."""
    logits, counts = [0.0] * VOCAB_SIZE, Counter(output)
    logits[best] = LOGIT
    if best in counts or best in prompt:
        logits[best] /= params.repetition_penalty  # a logit of 0 does not change
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return max(range(VOCAB_SIZE) if allowed is None else allowed, key=logits.__getitem__)


def _draw(
    best: int, params: SamplingParams, position: int, allowed: list[int] | None
) -> int | None:
    """Draw a token where only `best` has a logit; None if rounding could decide."""
    assert params.seed is not None, "a request with a known answer has a seed"
    others = [i for i in (range(VOCAB_SIZE) if allowed is None else allowed) if i != best]
    has_best = allowed is None or best in allowed
    other = math.exp(-LOGIT / params.temperature) if has_best else 1.0  # beside the most likely
    if params.min_p > other:
        return best
    if params.top_k:  # of equal tokens, the lowest ids are kept
        others = others[: params.top_k - has_best]
    ids = sorted([*[best] * has_best, *others])
    ends = list(accumulate(1.0 if i == best else other for i in ids))
    place = uniform(params.seed, position) * ends[-1]
    index = bisect_left(ends, place)
    begin = ends[index - 1] if index else 0.0
    nearest = min(ends[index] - place, place - begin if index else math.inf)
    return ids[index] if nearest > EDGE * other else None
