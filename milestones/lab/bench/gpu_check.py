"""Check and measure on a GPU what a CPU cannot show.

Run `python -m milestones gpu-check` on a machine with CUDA. Nothing is downloaded: the models have
random weights. Each case runs in a process of its own, so that a case that fails, or that leaves
the GPU in an error, loses nothing but itself. The JSON file is written after each case. A second
run goes on where the first one stopped; without the file, it starts from the beginning. A page
beside the file shows the lanes of a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.displays.demo import machine

from ... import recording
from ...chain import ROOT, milestones
from . import gpu_answers, gpu_kernels, gpu_speed, gpu_tiles
from .engines import HUGGING_FACE

SMALL, STANDARD = "tiny-qwen3", "random-qwen3-0.6b"
SECONDS = 300  # a case that takes longer has failed
MARK = "gpu-check result: "  # before the JSON in the output of the process of a case
Case = Callable[[], Any]  # returns a result, or rows: see `results_of`


def all_cases(device: str, page: Path, standard: str = STANDARD) -> dict[str, Case]:
    """Return the cases in the order in which they run: correctness before speed.

    A student's tree may end at any milestone. Then only the cases of its milestones are there.
    """
    names = milestones()
    paged = [name for name in names if (ROOT / name / "kernels.py").exists()]
    graphed = [name for name in names if (ROOT / name / "cuda_graph.py").exists()]
    cases: dict[str, Case] = {}
    for name in paged[:1]:
        cases["kernels"] = partial(gpu_answers.check_kernels, name, device)
    for name in names:
        cases[f"answers of {name}"] = partial(gpu_answers.check_engine, name, device)
    cases["passes"] = partial(gpu_answers.check_passes, device, standard)
    for name in paged[-1:]:
        cases["two engines"] = partial(gpu_answers.check_two_engines, name, device, standard)
        cases["decode"] = partial(gpu_kernels.decode, name, device)
        cases["prefill"] = partial(gpu_kernels.prefill, name, device)
        for dim in gpu_tiles.HEAD_DIMS:
            mixed, prompt = gpu_kernels.DECODES["256 mixed"], [gpu_tiles.PROMPT]
            for kind, lengths in (("decode", mixed), ("prefill", prompt)):
                tiles = gpu_tiles.TILES[kind]
                sweep = partial(gpu_tiles.sweep, name, device, kind, dim, lengths, tiles)
                cases[f"tiles of {kind}, head_dim {dim}"] = sweep
    for name in graphed[-1:]:
        cases["overlap"] = partial(gpu_answers.check_overlap, name, device)
        cases["graphs"] = partial(gpu_answers.check_graphs, name, device, standard, 256)
        for count in gpu_speed.RUNNING:
            nano = partial(gpu_speed.nano, name, device, standard, count)
            cases[f"nano, {count} requests"] = nano
        replay = partial(gpu_kernels.replay_kernels, name, device, standard)
        cases["kernels of a replay"] = replay
    cases["row kernels"] = partial(gpu_kernels.row_kernels, device)
    cases["sampling"] = partial(gpu_speed.sampling, device)
    cases["lanes"] = partial(gpu_speed.lanes, names[-1], device, standard, page)
    for name in names:
        few = name == names[0]  # it serves one request at a time
        cases[f"workloads of {name}"] = partial(gpu_speed.of_milestone, name, device, standard, few)
    for name in HUGGING_FACE:
        cases[f"workloads of {name}"] = partial(gpu_speed.of_hugging_face, name, device, standard)
    if gpu_speed.has_vllm():
        cases["workloads of vllm"] = partial(gpu_speed.of_vllm, device, standard)
    return cases


def results_of(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the result of a case. If the case yields rows, yield the result after each row.

    Such a result passes if there are rows, and all of them pass.
    """
    if isinstance(found, dict):
        yield found
        return
    result: dict[str, Any] = {"rows": [], "passed": False}
    for row in found:
        result["rows"].append(row)
        result["passed"] = all(row["passed"] for row in result["rows"])
        yield result
    if not result["rows"]:
        yield result


def run_case(name: str, file: Path) -> dict[str, Any]:
    """Run a case in a new process. A failure is a result too: `passed` False, and the `error`.

    The rows that were measured before the failure are kept.
    """
    command = [sys.executable, "-m", "milestones", "gpu-check", "--case", name, "--json", str(file)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as ended:
        late = {"passed": False, "error": f"it took longer than {SECONDS} seconds"}
        return latest_result(ended.stdout) | late
    result = latest_result(done.stdout)
    if done.returncode != 0 or not result:
        error = done.stderr[-2000:] or f"exit status {done.returncode}"
        return result | {"passed": False, "error": error}
    return result | ({"warnings": done.stderr[-2000:]} if done.stderr else {})


def latest_result(output: str | bytes | None) -> dict[str, Any]:
    """Return the last whole result in the output of a case; an empty one if there is none.

    After a timeout, the output is bytes, and the last line may be cut.
    """
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    lines = [line for line in whole if line.startswith(MARK)]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK)) if lines else {}
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones gpu-check`."""
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-check.json"),
        help="write the results to this file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--case", help="run only this case, in this process")


def main(args: argparse.Namespace) -> int:
    """Run all cases. Return 0 if all of them pass, 1 if one fails, 2 without a GPU."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check needs a CUDA device, and torch finds none on this machine")
        return 2
    cases = all_cases("cuda", args.json.with_suffix(".html"))
    if args.case:
        if args.case not in cases:
            console.print(f"unknown case {args.case!r}; there are {', '.join(cases)}")
            return 2
        for result in results_of(cases[args.case]()):
            sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
            sys.stdout.flush()
        return 0
    return run_all(list(cases), args, console)


def run_all(names: list[str], args: argparse.Namespace, console: Console) -> int:
    """Run the cases that have not passed before. Write the file and print a line after each."""
    document: dict[str, Any] = {"machine": machine(), "cases": {}}
    if args.json.exists():
        earlier = json.loads(args.json.read_text(encoding="utf-8"))
        if earlier.get("machine") == document["machine"]:
            document = earlier
    results = document["cases"]
    for name in names:
        if not results.get(name, {}).get("passed"):
            results[name] = run_case(name, args.json)
            recording.write(args.json, document)
        console.print(line(name, results[name]), soft_wrap=True, highlight=False, markup=False)
    return 0 if all(results[name]["passed"] for name in names) else 1


def line(name: str, result: dict[str, Any]) -> str:
    """Return one line about a case: whether it passed, and its numbers."""
    if "error" in result and not result["passed"]:
        return f"FAILED  {name}: {str(result['error']).strip().splitlines()[-1]}"
    rows = result.get("rows")
    numbers = [f"{sum(r['passed'] for r in rows)} of {len(rows)}"] if rows else []
    numbers += [
        f"{row['workload']} {row['tokens_per_second']:.0f} tokens/s ({row['sampling']})"
        for row in rows or []
        if "tokens_per_second" in row
    ]
    numbers += [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result.items()
        if isinstance(value, (int, float, str)) and key not in ("passed", "warnings")
    ]
    return f"{'passed' if result['passed'] else 'FAILED'}  {name}: {', '.join(numbers)}"
