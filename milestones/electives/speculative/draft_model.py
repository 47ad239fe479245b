"""A small model as a drafter. It keeps a KV cache of its own for each request."""

from __future__ import annotations

from itertools import takewhile
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from common import LoadedModel, Request


class DraftModel:
    """Guesses greedily with another model of the same vocabulary."""

    def __init__(self, draft: LoadedModel, target: LoadedModel) -> None:
        """Raises `ValueError` if the two models do not have the same tokens.

        Even if the draft model has sliding windows or recurrent states, because refused drafts
        cannot be removed from its cache.
        """
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"{draft.name} has a vocabulary of {draft.vocab_size} tokens, and {target.name} of "
                f"{target.vocab_size}: a draft model needs the same one"
            )
        if _tokens_of(draft) != _tokens_of(target):
            raise ValueError(f"{draft.name} and {target.name} have different tokens")
        layers = DynamicCache(config=draft.model.config).layers
        is_recurrent = getattr(draft.model, "_is_stateful", False)
        if is_recurrent or any(type(layer) is not DynamicLayer for layer in layers):
            raise ValueError(
                f"{draft.name} has sliding windows or recurrent states: refused drafts cannot be "
                "removed from its cache"
            )
        self.model = draft.model
        self.num_positions = draft.num_positions
        self.caches: WeakKeyDictionary[Request, tuple[DynamicCache, list[int]]]
        self.caches = WeakKeyDictionary()  # with the tokens that each cache has

    @torch.inference_mode()
    def propose(self, request: Request, count: int) -> list[int]:
        empty = DynamicCache(config=self.model.config), list[int]()
        cache, cached = self.caches.pop(request, empty)  # put back if no forward fails half-way
        if self.num_positions is not None:  # the last draft is no input, and needs no position
            count = min(count, self.num_positions + 1 - request.num_tokens)
        # Drafts that were refused are in the cache. The last token is always computed again.
        pairs = zip(cached, request.token_ids[:-1], strict=False)
        kept = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if kept < len(cached):
            cache.crop(kept - len(cached))  # a negative number of tokens: that many are removed
            del cached[kept:]
        tokens, drafts = request.token_ids[kept:], list[int]()
        while len(drafts) < count:
            inputs = torch.tensor([tokens], device=self.model.device)
            logits = self.model(inputs, past_key_values=cache, use_cache=True).logits[0, -1]
            cached += tokens
            tokens = [int(logits.argmax())]
            drafts += tokens
        self.caches[request] = cache, cached
        return drafts


def _tokens_of(loaded: LoadedModel) -> dict[str, int]:
    """Return the tokens that a model has. A tokenizer may have added tokens beyond these."""
    vocab = loaded.tokenizer.get_vocab()
    return {token: token_id for token, token_id in vocab.items() if token_id < loaded.vocab_size}
