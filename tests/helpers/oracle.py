"""The reference: Hugging Face's own greedy `generate`, and its logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from common import CompletionOutput, LLMEngine, LoadedModel, RequestOutput, SamplingParams
from tests import conftest
from tests.conftest import plain_model

TIE = 1e-3  # I1: below this gap between the two best logits, rounding may decide

MOST_STEPS = 10_000  # an engine that makes no progress fails, and does not hang


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, the log probabilities they were chosen from [n, V], and the top-2 gaps."""

    token_ids: list[int]
    logprobs: torch.Tensor
    gaps: list[float]


class PackedCache(DynamicCache):
    """Hugging Face's cache, which rounds keys and values as kv_quant stores them: 8 bits a number.

    A layer reads rounded numbers, also of the tokens that it has just computed.
    """

    rounded: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, rounded: Callable[[torch.Tensor], torch.Tensor]) -> PackedCache:
        """rounded: returns the numbers that the lines of keys or values stand for."""
        cache = cls()
        cache.rounded = rounded
        return cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.rounded(key_states), self.rounded(value_states)
        return super().update(key, value, *rest, **more)


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers in e4m3, with one scale for each token and head: [..., head_dim].

    Three bits of fraction: between two powers of two there are eight numbers, also below 2^-6.
    """
    scale = x.abs().amax(dim=-1, keepdim=True) / 448
    number = x / scale
    exponent = (number.abs().frexp().exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return torch.where(scale > 0, (number / step).round() * step * scale, 0)


def in_4_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 16 numbers, from the smallest of a token and head to the largest.

    The smallest number, and the size of a step, are rounded to bfloat16.
    """
    low = x.amin(dim=-1, keepdim=True).to(torch.bfloat16).to(x.dtype)
    step = ((x.amax(dim=-1, keepdim=True) - low) / 15).to(torch.bfloat16).to(x.dtype)
    count = torch.where(step > 0, (x - low) / step, 0).round().clamp(0, 15)
    return low + count * step


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers with one scale for each token and head: [..., head_dim]."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0)


def cache_of_engine() -> PackedCache | None:
    """Return a cache for Hugging Face's model that stores what the engine under test stores."""
    return PackedCache.of(in_8_bits) if "kv_quant" in conftest.UNDER_TEST else None


def reference(model: str, prompt: tuple[int, ...], max_tokens: int) -> Reference:
    """Return the result of `model.generate(do_sample=False)` on one prompt."""
    return _reference(model, prompt, max_tokens, cache_of_engine() is not None)


@functools.cache
def _reference(model: str, prompt: tuple[int, ...], max_tokens: int, packed: bool) -> Reference:
    """packed: only a part of the key, because engines have different references."""
    return generate(plain_model(model), prompt, max_tokens)


def generate(
    loaded: LoadedModel,
    prompt: tuple[int, ...],
    max_tokens: int,
    cache: DynamicCache | None = None,
) -> Reference:
    """cache: for Hugging Face's model; None: one that stores what the engine under test stores."""
    input_ids = torch.tensor([prompt])
    out = loaded.model.generate(  # type: ignore[operator]
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        past_key_values=cache_of_engine() if cache is None else cache,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=sorted(loaded.eos_token_ids),
        pad_token_id=0,
    )
    logits = torch.stack([step[0] for step in out.logits])
    return reference_of(out.sequences[0, len(prompt) :].tolist(), logits)


def reference_of(token_ids: list[int], logits: torch.Tensor) -> Reference:
    """Return tokens with what they were chosen from: the logits, [n, V]."""
    top2 = logits.float().topk(2, dim=-1).values
    gaps = (top2[:, 0] - top2[:, 1]).tolist()
    return Reference(token_ids, logits.float().log_softmax(dim=-1), gaps)


def assert_same_tokens(expected: Reference, got: list[int]) -> None:
    """I1: require the same tokens, up to a place where two logits of the reference tie."""
    for index, (ours, theirs) in enumerate(zip(got, expected.token_ids, strict=False)):
        if ours != theirs:
            gap = expected.gaps[index]
            assert gap < TIE, f"I1: token {index} is {ours}, not {theirs} (top-2 gap {gap:.4f})"
            return
    assert len(got) == len(expected.token_ids), f"I1: {got} is not {expected.token_ids}"


def assert_one_answer(model: str, output: RequestOutput, max_tokens: int) -> None:
    """Require I1 of a finished greedy request."""
    expected = reference(model, tuple(output.prompt_token_ids), max_tokens)
    assert_same_tokens(expected, output.outputs[0].token_ids)


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Step until no request is left. Return the outputs of each request, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        assert steps < MOST_STEPS, f"I5: {steps} steps, and a request has not finished"
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def completions(engine: LLMEngine) -> dict[str, CompletionOutput]:
    """Step until no request is left. Return what each request got in the end."""
    return {name: outputs[-1].outputs[0] for name, outputs in drain(engine).items()}


def serve_arrivals(
    engine: LLMEngine, arrivals: Sequence[tuple[int, list[int], SamplingParams]]
) -> dict[str, RequestOutput]:
    """Add requests before the step in which each arrives. Return their final outputs.

    Their names are their places in the list.
    """
    got: dict[str, RequestOutput] = {}
    for step in range(1 + max(arrival for arrival, *_ in arrivals)):
        for i, (arrival, prompt, params) in enumerate(arrivals):
            if arrival == step:
                engine.add_request(prompt, params, f"{i}")
        got.update({output.request_id: output for output in engine.step()})
    got.update({name: outputs[-1] for name, outputs in drain(engine).items()})
    return got


def greedy(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)  # type: ignore[arg-type]
