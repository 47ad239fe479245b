"""The choice of the attention backend: plain torch, kernels in C, or Triton kernels."""

from __future__ import annotations

from types import ModuleType

import torch

from common.fast import cpu_attention

from . import attention


def select_backend(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the module with the attention operations of a backend.

    name: `torch`, `compiled`, `triton`, or `auto` for the fastest one that can run. Raises
    `RuntimeError` if the kernels of the named backend cannot run.
    """
    compiled = cpu_attention.is_runnable(device, dtype)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "compiled" if compiled else "torch"
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
        raise RuntimeError(f"attention_backend={name!r} needs triton: {error}") from error
    triton_ops.require_runnable(device)
    return triton_ops
