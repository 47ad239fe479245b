"""Decide which models an engine can serve, and find the shapes of their keys and values.

A model that an engine would compute wrongly is refused when it is loaded. The error names the model
and the feature. Two checks find such a model: a look at its configuration (`features.py`),
and a probe that runs the model as the engine will (`probe.py`). The configuration also shows
features that begin at a later position than the probe reaches.
"""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from ..guard import EngineDeadError
from .features import (
    OTHER_ATTENTION,
    feature_of,
    seen_attention,
    supports_attention_interface,
    unsupported_by_own_cache,
    unsupported_feature,
)
from .probe import LayerKV, Probe, SlotCache, Span, additive_mask, in_order
from .shared import make_shareable

__all__ = [
    "LayerKV",
    "UnsupportedModelError",
    "additive_mask",
    "check_paged",
    "layer_shapes",
    "refuse",
    "require_full_attention",
    "require_own_cache",
    "start_probe",
]


# What a trial raises of these says nothing about the model or the kernels.
PASSED_ON = (NotImplementedError, MemoryError, torch.OutOfMemoryError, EngineDeadError, BdbQuit)
Inputs = TypeVar("Inputs")  # of a forward, in the form that an engine has
NO_KV = LayerKV(0, 0, 0)  # of a layer with a state instead of keys and values


class UnsupportedModelError(ValueError):
    """The model has a feature that this engine would compute wrongly; the message names it."""


@torch.inference_mode()
def require_own_cache(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse a model that is wrong with Hugging Face's own cache and one request at a time.

    Raises `UnsupportedModelError`.
    """
    make_shareable(model)
    refuse(model, unsupported_by_own_cache(model, max_model_len))
    with refusing(model):
        probe = Probe(model, max_model_len)
        while probe.again():
            for span in probe.one_at_a_time():
                if span.start == 0:
                    cache = DynamicCache(config=model.config)
                probe.check([span], _step_alone(model, probe, cache, span))


def _step_alone(
    model: PreTrainedModel, probe: Probe, cache: DynamicCache, span: Span
) -> torch.Tensor:
    """Run one forward for one request. Return the logits after its last token, [1, V]."""
    logits: torch.Tensor = model(
        input_ids=torch.tensor([probe.tokens_of(span)], device=model.device),
        position_ids=torch.arange(span.start, span.end, device=model.device)[None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    if (length := cache.get_seq_length()) != span.end:
        raise ValueError(f"its cache counts {length} tokens after {span.end}")
    return logits[:, -1]


@torch.inference_mode()
def require_full_attention(model: PreTrainedModel, max_model_len: int) -> list[LayerKV]:
    """Refuse a model that is wrong with our own KV cache and batches that are padded on the right.

    Only full causal attention passes. Returns the KV shape of each layer. Raises
    `UnsupportedModelError`.
    """
    make_shareable(model)
    refuse(model, unsupported_feature(model, max_model_len))
    with refusing(model):
        probe = Probe(model, max_model_len)
        while probe.again():
            cache = SlotCache()
            for step in probe.batched():
                probe.check(step, _padded_step(model, probe, cache, step))
        return cache.shapes()


def _padded_step(
    model: PreTrainedModel, probe: Probe, cache: SlotCache, step: list[Span]
) -> torch.Tensor:
    """Run one forward for both requests. Return the logits after the last token of each, [B, V]."""
    longest = max(span.end - span.start for span in step)
    ids = [probe.tokens_of(span) for span in step]
    ids = [tokens + [0] * (longest - len(tokens)) for tokens in ids]
    starts = torch.tensor([span.start for span in step], device=model.device)
    positions = starts[:, None] + torch.arange(longest, device=model.device)  # [B, T]
    last = torch.tensor([span.end - span.start - 1 for span in step], device=model.device)
    kept, place = last.unique(return_inverse=True)
    logits = model(
        input_ids=torch.tensor(ids, device=model.device),
        position_ids=positions,
        attention_mask=cache.begin_step(positions, model.dtype),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=kept,
    ).logits  # [B, len(kept), V]
    if logits.shape[1] != len(kept):
        raise ValueError(f"logits of {logits.shape[1]} tokens where {len(kept)} were asked for")
    return logits[torch.arange(len(step), device=model.device), place]


@torch.inference_mode()
def start_probe(
    model: PreTrainedModel, max_model_len: int, served: Collection[str] = ()
) -> tuple[Probe, list[LayerKV]]:
    """Refuse a model if its configuration shows that paged attention would compute it wrongly.

    served: see `unsupported_feature`. Returns a probe, which the engine must pass to
    `check_paged`, and the KV shape of each layer. Raises `UnsupportedModelError`.
    """
    make_shareable(model)
    refuse(model, unsupported_feature(model, max_model_len, served))
    probe = Probe(model, max_model_len)
    with refusing(model, None if supports_attention_interface(model) else OTHER_ATTENTION):
        seen = seen_attention(model, served)
        probe.suspect = seen.suspect
        if seen.layers and "linear_attention" in served:  # these have no keys and values
            seen.layers = dict.fromkeys(range(max(seen.layers)), NO_KV) | seen.layers
        return probe, in_order(seen.layers) if seen.layers else layer_shapes(model)


@torch.inference_mode()
def check_paged(
    probe: Probe,
    table: np.ndarray,
    flatten: Callable[..., Inputs],
    forward: Callable[[Inputs], torch.Tensor],
) -> None:
    """Let a paged engine compute the steps of a probe, and compare its logits.

    table: the pages of each request of the probe, [2, P] int32. flatten: returns the inputs of a
    step, from the arguments of `InputBuilder.flatten`. forward: returns their logits, [N, V].

    Raises `UnsupportedModelError` if the forward fails, or if the logits differ from those of the
    plain forward. An exception of `flatten` stays as it is, because it says nothing about the
    model.
    """
    for step in _steps(probe):
        tokens = [token for span in step for token in probe.tokens_of(span)]
        positions = np.array([p for span in step for p in range(span.start, span.end)])
        page_table = table[[span.row for span in step]]
        query_lens = [span.end - span.start for span in step]
        seq_lens, sampled = [span.end for span in step], list(range(len(step)))
        inputs = flatten(tokens, positions, page_table, query_lens, seq_lens, sampled)
        with refusing(probe.model, probe.suspect):
            probe.check(step, forward(inputs))


def _steps(probe: Probe) -> Iterator[list[Span]]:
    """Yield the steps of a flat batch until a probe has its result. What raises in them passes."""
    with refusing(probe.model, probe.suspect):
        while probe.again():
            yield from probe.mixed()


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerKV]:
    """Return the KV shape of each layer, from a forward of one token."""
    cache = SlotCache()
    positions = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(
        input_ids=positions + 1,
        position_ids=positions,
        attention_mask=cache.begin_step(positions, model.dtype),
        past_key_values=cache,
        use_cache=True,
    )
    return cache.shapes()


def refuse(model: PreTrainedModel, feature: str | None) -> None:
    """Raise `UnsupportedModelError` for `feature`; do nothing if it is None."""
    if feature is not None:
        raise UnsupportedModelError(_sentence(model, feature))


@contextmanager
def refusing(model: PreTrainedModel, suspect: str | None = None) -> Iterator[None]:
    """Turn an error of a probe into an `UnsupportedModelError` that names the model and feature.

    suspect: a feature that explains the error, if the caller knows one.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as cause:
        if isinstance(cause, UnsupportedModelError):  # from paged attention, which got no batch
            suspect = "attention that does not get the keyword arguments of the forward"
        found = f"a probe when it was loaded: {type(cause).__name__}: {cause}"
        raise UnsupportedModelError(
            f"{_sentence(model, suspect or feature_of(model, cause))} (found by {found})"
        ) from cause


def _sentence(model: PreTrainedModel, feature: str) -> str:
    name = model.config.name_or_path or type(model).__name__
    return (
        f"{name} ({model.config.model_type}) is not supported by this engine: it has {feature}. "
        "milestones/docs/MODELS.md lists the models that each milestone and the elective "
        "hybrid_memory serve"
    )
