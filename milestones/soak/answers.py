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

import torch
from transformers import DynamicCache

from common import EngineConfig, LoadedModel, Request, SamplingParams, load_model
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText

from ..instruments.hash_model import LOGIT, VOCAB_SIZE, HashChain, hash_model

MASK = 2**64 - 1
EDGE = 1e-4  # share of a token's interval; nearer than that to its end, rounding may decide
# A token of a tiny model is certain if no noise of this size changes it.
NOISE, NUM_NOISY = 1e-3, 12


@dataclass(frozen=True)
class Continuation:
    """The tokens after a prompt, and the log probability of each."""

    token_ids: list[int]
    logprobs: list[float]


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

    @abstractmethod
    def continuation(
        self, prompt: list[int], params: SamplingParams, max_tokens: int
    ) -> Continuation:
        """Continue a prompt by up to `max_tokens` tokens, as far as they are certain."""

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
        self, prompt: list[int], params: SamplingParams, max_tokens: int
    ) -> Continuation:
        """Compute hashes in plain Python, and draw from the two values that logits may have."""
        chain, tokens = HashChain(prompt), list[int]()
        total = math.exp(LOGIT) + VOCAB_SIZE - 1
        logprobs = []
        while len(tokens) < max_tokens:
            best = token = chain.next_token()
            if params.has_penalties:
                token = _after_penalties(best, prompt, tokens, params)
            if not params.is_greedy:
                drawn = _draw(best, params, chain.num_tokens)
                if drawn is None:
                    break
                token = drawn
            logprobs.append((LOGIT if token == best else 0.0) - math.log(total))
            tokens.append(token)
            chain.feed(token)
        return Continuation(tokens, logprobs)


def _after_penalties(
    best: int, prompt: list[int], output: list[int], params: SamplingParams
) -> int:
    """Return the most likely token of a greedy request with penalties. Of equals, the first."""
    logits, counts = [0.0] * VOCAB_SIZE, Counter(output)
    logits[best] = LOGIT
    if best in counts or best in prompt:
        logits[best] /= params.repetition_penalty  # a logit of 0 does not change
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits.index(max(logits))


def _draw(best: int, params: SamplingParams, position: int) -> int | None:
    """Draw a token where only `best` has a logit; None if rounding could decide."""
    assert params.seed is not None, "a request with a known answer has a seed"
    other = math.exp(-LOGIT / params.temperature)
    if params.min_p > other or params.top_k == 1:
        return best
    kept = params.top_k - 1 if params.top_k else VOCAB_SIZE  # the lowest ids of the other tokens
    ids = sorted({best, *[i for i in range(VOCAB_SIZE) if i != best][:kept]})
    ends = list(accumulate(1.0 if i == best else other for i in ids))
    place = uniform(params.seed, position) * ends[-1]
    index = bisect_left(ends, place)
    begin = ends[index - 1] if index else 0.0
    nearest = min(ends[index] - place, place - begin if index else math.inf)
    return ids[index] if nearest > EDGE * other else None


def uniform(seed: int, position: int) -> float:
    """Return the sampler's random number in [0, 1), in plain Python: 48 bits of splitmix64."""
    bits = _splitmix64((_splitmix64(seed) + position) & MASK)
    return ((bits >> 16) & (2**48 - 1)) / 2.0**48


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class TinySource(Source):
    """A tiny random model. Hugging Face's own modules compute each of its answers once."""

    def __init__(self, name: str) -> None:
        config = EngineConfig(model=name, device="cpu")
        super().__init__(load_model(config))
        self.plain = load_model(config, plain=True).model
        self.known: dict[tuple[object, ...], Continuation] = {}

    def continuation(
        self, prompt: list[int], params: SamplingParams, max_tokens: int
    ) -> Continuation:
        """Run the plain model and the sampler on this request alone."""
        p = params
        penalties = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
        sampling = (p.temperature, p.top_k, p.top_p, p.min_p, p.seed)
        key = (*prompt, None, *sampling, *penalties, max_tokens)
        if key not in self.known:
            self.known[key] = self._compute(prompt, params, max_tokens)
        return self.known[key]

    @torch.inference_mode()
    def _compute(self, prompt: list[int], params: SamplingParams, max_tokens: int) -> Continuation:
        cache = DynamicCache(config=self.plain.config)
        noise = torch.randn(
            NUM_NOISY, self.loaded.vocab_size, generator=torch.Generator().manual_seed(0)
        )
        fed, tokens, logprobs = prompt, list[int](), list[float]()
        while len(tokens) < max_tokens:
            logits = self.plain(torch.tensor([fed]), past_key_values=cache).logits[0, -1:]  # [1, V]
            noisy = torch.cat([logits, logits + NOISE * noise])  # [1 + NUM_NOISY, V]
            drawn = self._sample(noisy, prompt, tokens, params)
            if len(set(drawn)) > 1:
                break
            fed = drawn[:1]
            tokens += fed
            logprobs.append(float(logits[0].log_softmax(-1)[fed[0]]))
        return Continuation(tokens, logprobs)

    def _sample(
        self, logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
    ) -> list[int]:
        """Draw from each row as the next token of the same request."""
        seed = params.seed or 0
        text = OutputText(self.loaded.tokenizer, params)
        request = Request(
            "", None, prompt, params, seed=seed, max_model_len=512, text=text, arrival_time=0.0
        )
        request.token_ids += output
        rows = [request] * len(logits)
        tokens: list[int] = sample(
            logits, SamplingMetadata.from_requests(rows, "cpu")
        ).token_ids.tolist()
        return tokens
