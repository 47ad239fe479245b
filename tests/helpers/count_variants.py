"""Count the variants of each kernel that Triton would compile in steps of many shapes.

    python -m tests.helpers.count_variants m3_paged

No kernel runs: a launch only asks Triton which variant it needs. The output is JSON, with the
number of variants by kernel, and the largest size of a grid in its second or third dimension. This
runs in a process of its own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from common.fast.passes import triton_kernels
from milestones.chain import package
from milestones.lab.instruments.paged_case import PagedCase

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
HEADS, KV_HEADS, DIM = 16, 8, 128
MANY = 65_536  # tokens of a step: more than the second dimension of a grid may have


def main() -> None:
    milestone = package(sys.argv[1])
    variants: dict[str, set[str]] = {}
    grids: list[tuple[int, ...]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        _values, specialization, chosen = bind(*args, debug=False, **options)
        grids.append(grid)
        variants.setdefault(kernel.__name__, set()).add(f"{specialization} {chosen}")

    JITFunction.run = run
    attention = importlib.import_module(f"{milestone}.attention")
    ops = importlib.import_module(f"{milestone}.triton_ops")
    for decodes in (0, 1, 5, 16):
        for chunks in ((), (2,), (16, 70, 2)):
            for context in (1, 16, 300):
                counts = [1] * decodes + list(chunks)
                if counts:
                    paged_step(attention, ops, [context + n - 1 for n in counts], counts)
    paged_step(attention, ops, [MANY], [MANY])
    for tokens in (1, 2, 15, 16, 17, 256, 1000, MANY):
        row_step(tokens)
    report = {name: len(found) for name, found in variants.items()}
    report["widest"] = max(size for grid in grids for size in grid[1:])
    sys.stdout.write(json.dumps(report))


def paged_step(attention: Any, ops: Any, contexts: list[int], counts: list[int]) -> None:
    """Launch the attention kernels for one step."""
    case = PagedCase(attention, contexts, counts, (HEADS, KV_HEADS), DIM, 16, torch.bfloat16)
    case.run(ops)


def row_step(tokens: int) -> None:
    """Launch the kernels of the model passes for one step, with q, k and v in one tensor."""
    hidden, weight = torch.zeros(1, tokens, 1024, dtype=torch.bfloat16), torch.zeros(1024)
    qkv = torch.zeros(1, tokens, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    q, k = qkv[:, :, :HEADS], qkv[:, :, HEADS : HEADS + KV_HEADS]
    angles = torch.zeros(1, tokens, DIM, dtype=torch.bfloat16)
    triton_kernels.rms_norm(hidden, weight, 1e-6)
    triton_kernels.rms_norm(q, weight[:DIM], 1e-6)
    triton_kernels.rotate(q.transpose(1, 2), k.transpose(1, 2), angles, angles)
    triton_kernels.add_rms_norm(hidden, hidden, weight, 1e-6)
    triton_kernels.norm_and_rotate(
        qkv.flatten(2), (HEADS, KV_HEADS), DIM, angles, angles, (weight, weight), 1e-6
    )
    triton_kernels.silu_mul(*torch.zeros(1, tokens, 6144, dtype=torch.bfloat16).chunk(2, dim=-1))


if __name__ == "__main__":
    main()
