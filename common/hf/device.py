"""The device of a model, and the precisions that it computes in."""

from __future__ import annotations

import logging

import torch

from ..fast import keep_freed_memory

OLDEST_GPU = (7, 5)  # compute capability: of a T4, of the RTX 20 series
logger = logging.getLogger(__name__)


def open_device(name: str) -> torch.device:
    """Return the device of a configuration, and set what holds for the whole process."""
    device = resolve_device(name)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        # On an H100 or newer, torch prefers cuDNN's attention. That makes a plan for each new
        # length, which takes tens of milliseconds, and every decode step has a new length.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def resolve_device(name: str) -> torch.device:
    """Return the device of a configuration. Raises `ValueError` if this machine has none."""
    if name == "auto":
        return torch.device("cuda" if _has_usable_gpu() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto' or a torch device, got {name!r}") from error
    if device.type == "mps":
        raise ValueError("device must be cpu or cuda: mps has no float64, which sampling needs")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch finds no CUDA device here")
    return device


def _has_usable_gpu() -> bool:
    """Return whether there is a GPU that current builds of torch have code for."""
    if not torch.cuda.is_available():
        return False
    if (capability := torch.cuda.get_device_capability()) >= OLDEST_GPU:
        return True
    logger.warning(
        "%s has compute capability %d.%d: current builds of torch have no code for GPUs before "
        "%d.%d, so the CPU is used. device='cuda' tries the GPU",
        torch.cuda.get_device_name(), *capability, *OLDEST_GPU,
    )  # fmt: skip
    return False


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of a configuration; `auto` on a GPU. Raises `ValueError` if it cannot be."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    if dtype == torch.bfloat16 and not _has_bfloat16(device):
        raise ValueError(
            f"dtype is 'bfloat16', but {torch.cuda.get_device_name(device)} cannot compute it: use "
            "'float16' or 'auto'"
        )
    return dtype


def half_type(device: torch.device, dtype: torch.dtype | str) -> torch.dtype:
    """Return `dtype`; for `auto`, bfloat16, or float16 on a GPU that cannot compute bfloat16."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.bfloat16 if _has_bfloat16(device) else torch.float16


def _has_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes bfloat16. GPUs before Ampere, such as a T4, do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
