"""Try the Triton kernels of an engine once, before its model is tried.

Triton compiles a kernel when it is first called, for this GPU and for the shapes of this model. A
failure then has nothing to do with the model. So it gets an error of its own, or `auto` uses torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel

from .support import PASSED_ON, LayerKV

logger = logging.getLogger(__name__)
WIDE = 4096  # tokens
MODERN = (8, 0)  # from this compute capability on, Triton supports a GPU


def kernels_run(
    name: str,
    ops: ModuleType,
    metadata: Callable[..., Any],
    model: PreTrainedModel,
    layers: Sequence[LayerKV],
    page_size: int,
) -> bool:
    """Return whether an engine can use its Triton kernels. If not, it must use torch.

    name: the `attention_backend`. ops: the kernels of a milestone. metadata: its
    `AttentionMetadata`. Raises `RuntimeError` if `triton` is named and fails. It is also raised for
    `auto` on a GPU that Triton supports: the engine would be several times slower than expected.
    """
    device = model.device
    try:
        ops.require_runnable(device)
    except RuntimeError as error:
        refuse_or_warn(name, str(error), error)
        return False
    try:
        for layer in {layer for layer in layers if layer.num_kv_heads}:
            _run_once(ops, metadata, model, layer, page_size)
    except PASSED_ON:
        raise
    except Exception as error:
        gpu, capability = "the interpreter", MODERN
        if device.type == "cuda":
            gpu = torch.cuda.get_device_name(device)
            capability = torch.cuda.get_device_capability(device)
        cause = f"the attention kernels fail on {gpu}: {type(error).__name__}: {error}"
        refuse_or_warn(name if capability < MODERN else "triton", cause, error)
        return False
    return True


def refuse_or_warn(name: str, cause: str, error: Exception) -> None:
    """Raise `RuntimeError`, or warn for `auto` that torch is used instead of Triton kernels."""
    if name != "auto":
        raise RuntimeError(
            f"{cause}. attention_backend='torch' is slower, and needs no Triton"
        ) from error
    logger.warning("%s. Attention in torch, which is slower, is used instead", cause)


@torch.inference_mode()
def _run_once(
    ops: ModuleType,
    metadata: Callable[..., Any],
    model: PreTrainedModel,
    layer: LayerKV,
    page_size: int,
) -> None:
    """Store three tokens, then attend with a decode and with a chunk of two. Raise what fails."""
    device, kv_heads = model.device, layer.num_kv_heads
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    heads = heads if isinstance(heads, int) and heads % kv_heads == 0 else kv_heads

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device, dtype=model.dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    keys = zeros(kv_heads, 2, page_size, layer.key_dim)
    values = zeros(kv_heads, 2, page_size, layer.value_dim)
    query, key, value = (
        zeros(3, heads, layer.key_dim),
        zeros(3, kv_heads, layer.key_dim),
        zeros(3, kv_heads, layer.value_dim),
    )
    meta = metadata(
        slot_mapping=ints(0, 0, 1).long(), query_start_loc=ints(0, 1, 3), seq_lens=ints(1, 2),
        page_table=ints(0, 1, 0, 1).view(2, 2), page_size=page_size, num_decodes=1,
        query_lens_cpu=[1, 2], seq_lens_cpu=[1, 2],
    )  # fmt: skip
    ops.store_kv(keys, values, key, value, meta)
    outputs = [ops.paged_prefill(query[1:], keys, values, meta, 1.0)]
    for width in (1, -(-WIDE // page_size)):  # the second table is so wide that a context is split
        table = meta.page_table[:, :1].expand(-1, width).contiguous()
        decode = replace(meta, page_table=table)
        outputs.append(ops.paged_decode(query[:1], keys, values, decode, 1.0))
    if not all(bool(output.isfinite().all().item()) for output in outputs):  # waits
        raise ArithmeticError("attention to zeros is not a finite number")
