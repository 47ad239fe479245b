"""`choose`: the tokens of a batch, by Triton kernels on a GPU, and by torch everywhere else."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from .draws import BLOCK, DrawParams, choose_in_torch, most_likely
from .filters import Filters

logger = logging.getLogger(__name__)


def choose(logits: torch.Tensor, draws: DrawParams | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each row, and whether its logits are a distribution: [B] int64 and bool.

    logits: [B, V], any floating-point type. A row that is not valid gets any token of the
    vocabulary. The token of a greedy row is the exact argmax of its logits.
    """
    if draws is None:
        return most_likely(logits)
    if logits.is_cuda and (kernels := kernels_on(logits.device, logits.dtype)) is not None:
        return kernels.choose(logits, draws)
    return choose_in_torch(logits, draws)


@functools.cache
def kernels_on(device: torch.device, dtype: torch.dtype) -> Any:
    """Return the module of the Triton kernels. None, with a warning, if they do not run on a GPU.

    They are compiled and compared with torch here, so that no request waits for a compiler.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 2 * BLOCK - 9, generator=generator)).to(device, dtype)
    filters = Filters(
        top_k=torch.tensor([0, 40, 0], device=device),
        top_p=torch.tensor([0.9, 0.8, 1.0], dtype=torch.float64, device=device),
        log_min_p=torch.full((3,), -9.0, device=device),
        k_rows=torch.tensor([1], device=device),
        p_rows=torch.tensor([0], device=device),
        largest_k=40, uses_top_p=True,
    )  # fmt: skip
    uniforms = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64, device=device)
    draws = DrawParams(torch.ones(3, device=device), uniforms > 1, uniforms, None)
    try:
        from . import draw_kernels

        for draws.filters in (None, filters):
            expected = choose_in_torch(logits, draws)
            if not all(map(torch.equal, draw_kernels.choose(logits, draws), expected)):
                raise ArithmeticError("they choose other tokens than torch")
    except Exception as error:
        logger.warning("the kernels of the sampler fail on %s, so torch samples: %s", device, error)
        return None
    return draw_kernels
