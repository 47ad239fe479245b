"""The choice of the attention backend: plain torch, kernels in C, or Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from transformers import PreTrainedModel

from common.fast import cpu_attention
from common.hf.kernel_trial import kernels_run, refuse_or_warn
from common.hf.probe import LayerKV

from . import attention


def select_backend(
    name: str, model: PreTrainedModel, layers: Sequence[LayerKV], page_size: int
) -> ModuleType:
    """Return the module with the attention operations of a backend.

    name: `torch`, `compiled`, `triton`, or `auto` for the fastest one that can run. Triton kernels
    are tried once. Raises `RuntimeError` if the kernels of the named backend cannot run, or if
    `auto` finds that they fail on a GPU on which they should run.
    """
    compiled = cpu_attention.is_runnable(model.device, model.dtype)
    if name == "auto" and model.device.type != "cuda":
        name = "compiled" if compiled else "torch"
    if name == "torch":
        return attention
    if name == "compiled":
        if not compiled:
            raise RuntimeError(
                "attention_backend='compiled' needs a C compiler, and float32 on a CPU"
            )
        return cpu_attention
    try:
        from . import triton_ops
    except ImportError as error:
        refuse_or_warn(name, f"Triton cannot be imported: {error}", error)
        return attention
    batch = attention.AttentionMetadata
    runs = kernels_run(name, triton_ops, batch, model, layers, page_size)
    return triton_ops if runs else attention
