"""Run one Triton kernel and compare its results with torch, in a process for `doctor`.

Its argument is `interpreted` (with TRITON_INTERPRET=1) or `compiled`. It prints a line of JSON: the
largest error, whether all results are zero, and the GPU's name or null.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

ROWS, DIM = 16, 32


@triton.jit
def softmax_kernel(query, key, out, rows, DIM: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201, N803
    """Compute the softmax of query-key scores, as attention kernels do."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    mask = row[:, None] < rows
    q = tl.load(query + row[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    k = tl.load(key + row[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k))
    scores = tl.where(row[None, :] < rows, scores, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    weights /= tl.sum(weights, 1)[:, None]
    tl.store(out + row[:, None] * ROWS + row[None, :], weights, mask=mask)


def main(how: str) -> dict[str, Any]:
    """Run the kernel and compare."""
    if how == "compiled" and not torch.cuda.is_available():
        return {"gpu": None}
    device = "cuda" if how == "compiled" else "cpu"
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, ROWS, DIM, generator=generator).to(device)
    out = torch.zeros(ROWS, ROWS, device=device)
    rows = ROWS - 3
    softmax_kernel[(1,)](query, key, out, rows, DIM=DIM, ROWS=ROWS)
    expected = (query[:rows] @ key[:rows].T).softmax(-1)
    return {
        "error_of": float((out[:rows, :rows] - expected).abs().max()),
        "zeros": not bool(out.any()),
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name() if how == "compiled" else None,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
