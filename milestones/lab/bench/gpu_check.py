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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from common.displays.demo import machine

from ... import recording
from ...chain import ROOT, milestones
from . import gpu_answers, gpu_kernels, gpu_peers, gpu_sampling, gpu_speed, gpu_tiles
from .engines import HUGGING_FACE
from .workloads import WORKLOADS

SMALL, STANDARD = "tiny-qwen3", "random-qwen3-0.6b"
MINUTES = 15.0  # of all cases together
MARK = "gpu-check result: "  # before the JSON in the output of the process of a case


@dataclass(frozen=True)
class Case:
    """A check or a measurement. If it takes longer than its limit, it has failed."""

    run: Callable[[], Any]  # returns a result, or rows: see `results_of`
    seconds: int
    quick: bool = False  # whether it is part of `--quick`
    named: bool = False  # whether it runs only if `--only` names it

    def is_wanted(self, name: str, only: list[str], quick: bool) -> bool:
        """Return whether it runs. only: the beginnings of names; empty for all."""
        if only:
            return name.startswith((*only,))
        return self.quick or not (quick or self.named)


def all_cases(
    device: str, page: Path, standard: str = STANDARD, peers: Path | None = None
) -> dict[str, Case]:
    """Return the cases in the order in which they run: correctness before speed.

    peers: a folder with checkouts of other engines. Each one is measured on the standard benchmark.
    A student's tree may end at any milestone. Then only the cases of its milestones are there.
    """
    names = milestones()
    paged = [name for name in names if (ROOT / name / "kernels.py").exists()]
    graphed = [name for name in names if (ROOT / name / "cuda_graph.py").exists()]
    cases: dict[str, Case] = {}

    def add(name: str, seconds: int, run: Callable[..., Any], *given: Any, **when: bool) -> None:
        cases[name] = Case(partial(run, *given), seconds, **when)

    for name in paged[:1]:
        add("kernels", 45, gpu_answers.check_kernels, name, device, quick=True)
    for name in names:
        add(f"answers of {name}", 25, gpu_answers.check_engine, name, device, quick=True)
    add("passes", 25, gpu_answers.check_passes, device, standard)
    for name in paged[-1:]:
        add("two engines", 30, gpu_answers.check_two_engines, name, device, standard)
        add("decode", 20, gpu_kernels.decode, name, device)
        add("prefill", 15, gpu_kernels.prefill, name, device)
    for name in graphed[-1:]:
        add("overlap", 20, gpu_answers.check_overlap, name, device)
        add("graphs", 35, gpu_answers.check_graphs, name, device, standard, 256, quick=True)
        for count in gpu_speed.RUNNING:
            quick = count == gpu_speed.RUNNING[-1]
            add(f"nano, {count} requests", 45, gpu_speed.nano, name, device, standard, count,
                quick=quick)  # fmt: skip
        add("kernels of a replay", 30, gpu_kernels.replay_kernels, name, device, standard)
    add("row kernels", 20, gpu_kernels.row_kernels, device)
    add("sampling", 30, gpu_sampling.sampling, device)
    add("lanes", 25, gpu_speed.lanes, names[-1], device, standard, page)
    for name in names:
        few = [*WORKLOADS] if name == names[0] else []  # it serves one request at a time
        add(f"workloads of {name}", 35, gpu_speed.of_milestone, name, device, standard, few)
    for name in HUGGING_FACE:
        add(f"workloads of {name}", 35, gpu_speed.of_hugging_face, name, device, standard)
    for name in paged[-1:]:
        for kind, dim, lengths in gpu_tiles.SWEEPS:
            add(f"tiles of {kind}, head_dim {dim}", 90, gpu_tiles.sweep, name, device, kind, dim,
                lengths, gpu_tiles.TILES[kind], named=True)  # fmt: skip
    if gpu_peers.has_vllm():
        add("workloads of vllm", 240, gpu_peers.of_vllm, device, standard, named=True)
    for name in gpu_peers.CHECKOUTS if peers else ():
        if peers and (peers / name).is_dir():
            add(f"nano of {name}", 240, gpu_peers.of_checkout, name, peers, device, standard)
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


def run_case(name: str, seconds: int, file: Path, peers: Path | None) -> dict[str, Any]:
    """Run a case in a new process. A failure is a result too: `passed` False, and the `error`.

    The rows that were measured before the failure are kept.
    """
    command = [sys.executable, "-m", "milestones", "gpu-check", "--case", name, "--json", str(file)]
    command += ["--peers", str(peers.resolve())] if peers else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as ended:
        late = {"passed": False, "error": f"it took longer than {seconds} seconds"}
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
    parser.add_argument("--quick", action="store_true", help="run the most important cases only")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[],
        help="run the cases with names that begin like this, such as: --only nano 'answers of'; "
        "those of tiles and of vLLM run only so",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=MINUTES,
        help="start no case after that time; the same command goes on (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", type=Path, metavar="FOLDER",
        help="measure nano-vllm and mini-sglang too: a folder with a checkout of each",
    )  # fmt: skip
    parser.add_argument("--case", help="run only this case, in this process")


def main(args: argparse.Namespace) -> int:
    """Run all cases. Return 0 if all of them pass, 1 if one fails, 2 without a GPU."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu-check needs a CUDA device, and torch finds none on this machine")
        return 2
    cases = all_cases("cuda", args.json.with_suffix(".html"), peers=args.peers)
    if args.case:
        if args.case not in cases:
            console.print(f"unknown case {args.case!r}; there are {', '.join(cases)}")
            return 2
        for result in results_of(cases[args.case].run()):
            sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
            sys.stdout.flush()
        return 0
    if args.peers and not any(name.startswith("nano of ") for name in cases):
        console.print(f"{args.peers} has no folder {' or '.join(gpu_peers.CHECKOUTS)}")
        return 2
    wanted = {n: case for n, case in cases.items() if case.is_wanted(n, args.only, args.quick)}
    if not wanted:
        console.print(f"no case has such a name; there are {', '.join(cases)}")
        return 2
    return run_all(wanted, args, console)


def run_all(cases: dict[str, Case], args: argparse.Namespace, console: Console) -> int:
    """Run the cases that have not passed before. Write the file and print a line after each."""
    started = time.monotonic()
    document: dict[str, Any] = {"machine": machine(), "cases": {}}
    if args.json.exists():
        earlier = json.loads(args.json.read_text(encoding="utf-8"))
        if earlier.get("machine") == document["machine"]:
            document = earlier
    results = document["cases"]
    for name, case in cases.items():
        if not results.get(name, {}).get("passed"):
            if time.monotonic() - started > 60 * args.minutes:
                console.print(f"stopped after {args.minutes:g} minutes; run it again to go on")
                return 1
            results[name] = run_case(name, case.seconds, args.json, args.peers)
            recording.write(args.json, document)
        console.print(line(name, results[name]), soft_wrap=True, highlight=False, markup=False)
    return 0 if all(results[name]["passed"] for name in cases) else 1


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
