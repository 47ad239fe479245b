"""The search for the fastest tiles of the attention kernels, for `gpu-check`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from common.displays.demo import machine

from ...chain import load
from .gpu_kernels import DECODES, decode_case, prefill_case, seconds

# Rows of a tile (None: as the kernel has it), positions, warps, stages.
Tile = tuple[int | None, int, int, int]
DECODE_TILES: list[Tile] = [
    (None, tile, warps, stages)
    for tile in (32, 64, 128)
    for warps in (2, 4, 8)
    for stages in (3, 5)
]
PREFILL_TILES: list[Tile] = [
    (32, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 128, 8, 2),
    (128, 32, 8, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
]  # fmt: skip
TILES = {"decode": DECODE_TILES, "prefill": PREFILL_TILES}
SWEEPS = [  # the kernel, the size of a head, and the contexts or the prompt
    (kind, dim, lengths)
    for dim in (64, 128, 256)
    for kind, lengths in (("decode", DECODES["256 mixed"]), ("prefill", [4096]))
]


def sweep(
    milestone: str, device: str, kind: str, dim: int, contexts: list[int], tiles: list[Tile]
) -> dict[str, Any]:
    """Measure the decode or the prefill kernel with each of some tiles, for heads of size `dim`.

    contexts: of the requests of a decode, or the lengths of the prompts. `fastest` is a line of
    text: the best tile, to be pasted into `kernels.tiles`, and how much it gains.
    """
    ops = load(milestone, "triton_ops")
    if kind == "decode":
        case, pools = decode_case(milestone, device, contexts, dim)
        run = ops.paged_decode
    else:
        case, run = prefill_case(milestone, device, contexts, dim), ops.paged_prefill
        pools = [(case.keys, case.values)]

    def work() -> None:
        for keys, values in pools:
            run(case.query, keys, values, case.meta, 0.25)

    times: dict[str, float | str] = {"now": _us(work, device, len(pools))}
    for rows, tile, warps, stages in tiles:
        shape = {"TILE": tile, "num_warps": warps, "num_stages": stages}
        shape |= {} if rows is None else {"ROWS": rows}
        with tiled(ops.kernels, kind, **shape):
            times[json.dumps(shape)] = _us(work, device, len(pools))
    measured = {name: us for name, us in times.items() if isinstance(us, float)}
    best = min(measured, key=measured.__getitem__, default="now")
    gain = measured.get("now", 0.0) / measured.get(best, 1.0)
    return {
        "tiles": times,
        "fastest": f'"{kind}": {best} for head_dim {dim} on {machine()}: {gain:.2f} times as fast',
        "passed": bool(measured),
    }


def tiled(kernels: Any, kind: str, **changes: int) -> AbstractContextManager[Any]:
    """Inside this context, the `decode` or the `prefill` kernel has another tile."""
    own = kernels.tiles

    def tiles(*args: Any) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = own(*args)
        return {**found, kind: {**found[kind], **changes}}

    return patch.object(kernels, "tiles", tiles)


def _us(work: Callable[[], Any], device: str, calls: int = 1) -> float | str:
    """Return microseconds, or the error of a tile that needs too much shared memory."""
    try:
        return 1e6 * seconds(work, device) / calls
    except Exception as error:
        return repr(error)[:200]
