"""Check on a GPU what a CPU cannot show: compiled kernels, engines, overlap and bandwidth.

Run `python -m milestones gpu-check --json milestones/results/NAME.json` on a machine with CUDA. The
models are small and have random weights, so nothing is downloaded. Prints a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common import EngineConfig, SamplingParams, load_model
from common.displays.dashboard import summary_table
from common.displays.demo import machine

from ..chain import ROOT, milestones
from ..instruments.paged_case import PagedCase

CASES: list[dict[str, Any]] = [
    {"contexts": [1, 255, 256, 257, 513], "counts": [1] * 5, "heads": (6, 2), "dim": 64},
    {"contexts": [9, 700, 33, 1500], "counts": [1, 1, 33, 400], "heads": (9, 3), "dim": 80},
    {"contexts": [64, 4096, 31], "counts": [1, 1, 31], "heads": (16, 8), "dim": 128},
    {"contexts": [77, 300], "counts": [20, 300], "heads": (7, 1), "dim": 256},
]
PAGE_SIZES = (1, 16, 256)
BANDWIDTH_SHAPES = ((16, 512), (64, 512), (64, 2048), (256, 1024))  # sequences, context
PROMPTS = [[7], [1, 2, 3], list(range(40, 90)), list(range(200, 100, -1))]


def check_kernels(milestone: str, device: str) -> list[dict[str, Any]]:
    """Compare each case, in three types and page sizes, with the torch version in float64."""
    attention = importlib.import_module(f"{milestone}.attention")
    kernels = importlib.import_module(f"{milestone}.triton_ops")
    rows = []
    for shape in CASES:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for page_size in PAGE_SIZES:
                case = PagedCase(
                    attention, **shape, page_size=page_size, dtype=dtype, device=device
                )
                error = case.error(kernels)
                rows.append(
                    {
                        **shape,
                        "dtype": str(dtype),
                        "page_size": page_size,
                        "error": error,
                        "passed": error < case.tolerance,
                    }
                )
    return rows


def check_engine(milestone: str, device: str) -> dict[str, Any]:
    """Compare a milestone's greedy answers on the device with those of Hugging Face, in float32."""
    config = EngineConfig(model="tiny-qwen3", device=device, dtype="float32", max_num_seqs=3)
    plain = load_model(config, plain=True)
    with importlib.import_module(milestone).LLMEngine(config) as engine:
        params = SamplingParams(max_tokens=24, temperature=0)
        outputs = engine.generate(PROMPTS, params, progress=False)
        engine.check_invariants()
    same = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt], device=device)
        expected = plain.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        same += expected[0, len(prompt) :].tolist() == output.outputs[0].token_ids
    return {
        "milestone": milestone,
        "same": same,
        "of": len(PROMPTS),
        "passed": same == len(PROMPTS),
    }


def decode_bandwidth(milestone: str) -> list[dict[str, Any]]:
    """Return the bytes of KV per second that the decode kernel reads, and its ratio to a copy."""
    from triton.testing import do_bench

    attention = importlib.import_module(f"{milestone}.attention")
    kernels = importlib.import_module(f"{milestone}.triton_ops")
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * 2**30 / (do_bench(lambda: target.copy_(source), return_mode="median") / 1e3)
    rows = []
    for sequences, context in BANDWIDTH_SHAPES:
        case = PagedCase(
            attention, [context] * sequences, [1] * sequences, (16, 8), 128, 16,
            torch.bfloat16, "cuda",
        )  # fmt: skip
        keys, values = case.keys.nan_to_num(0), case.values.nan_to_num(0)
        # Use several copies in turn, so that the cache of the GPU does not hold them.
        pools = [(keys.clone(), values.clone()) for _ in range(8)]

        def decode(case: PagedCase = case, pools: list[Any] = pools) -> None:
            for keys, values in pools:
                kernels.paged_decode(case.query, keys, values, case.meta, 0.25)

        graph = torch.cuda.CUDAGraph()
        decode()
        with torch.cuda.graph(graph):
            decode()
        seconds = do_bench(graph.replay, return_mode="median") / 1e3 / len(pools)
        moved = 2 * sequences * context * 8 * 128 * 2
        rows.append(
            {
                "sequences": sequences,
                "context": context,
                "microseconds": seconds * 1e6,
                "bytes_per_second": moved / seconds,
                "of_copy": moved / seconds / copy,
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones gpu-check`."""
    parser.add_argument("--json", type=Path, help="write the results to this file")


def main(args: argparse.Namespace) -> int:
    """Run all checks. Return 0 if all of them pass, 1 if one fails, 2 without a GPU."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check needs a CUDA device, and torch finds none on this machine")
        return 2
    names = milestones()
    paged = [name for name in names if (ROOT / name / "kernels.py").exists()]
    engines = [check_engine(name, "cuda") for name in names]
    kernels = check_kernels(paged[0], "cuda")
    # A student's tree without the milestone that overlaps has no `overlap_check.py` either.
    overlaps = (Path(__file__).parent / "overlap_check.py").exists()
    check = importlib.import_module(f"{__package__}.overlap_check") if overlaps else None
    overlap = check.check_overlap("cuda") if check else []
    bandwidth = decode_bandwidth(paged[0])
    results = {
        "machine": machine(), "engines": engines, "kernels": kernels, "overlap": overlap,
        "decode": bandwidth,
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = summary_table(f"gpu-check on {machine()}", "what", "passed", "of")
    for engine in engines:
        table.add_row(engine["milestone"], str(engine["same"]), str(engine["of"]))
    table.add_row("overlap settings", str(sum(o["passed"] for o in overlap)), str(len(overlap)))
    table.add_row("kernel cases", str(sum(k["passed"] for k in kernels)), str(len(kernels)))
    console.print(table)
    for row in bandwidth:
        console.print(
            f"decode, {row['sequences']} sequences of {row['context']}: "
            f"{row['microseconds']:.0f} us, {row['of_copy']:.0%} of the bandwidth of a copy"
        )
    for row in overlap:
        graphs, loop = ("no graphs", "graphs"), ("serial", "overlapped")
        console.print(
            f"{loop[row['enable_overlap']]}, {graphs[row['cuda_graph']]}: gap between forwards "
            f"{row['gap_us']:.0f} us, {row['step_us']:.0f} us per step"
        )
    return 0 if all(entry["passed"] for entry in [*engines, *kernels, *overlap]) else 1
