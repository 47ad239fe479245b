"""Measure every milestone and other engines on the same workloads, in one run.

Each measurement runs in its own process. The engines take turns in each round, so a machine that
slows down slows all of them. The tables show the median of the rounds. Compare only ratios of one
run: absolute numbers depend on the machine.

    python -m milestones bench --workload batch --workload shared --rounds 3 --json bench.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.table import Table

from common import EMBEDDED_MODEL, EngineConfig, load_model
from common.displays.dashboard import summary_table
from common.displays.demo import machine
from common.displays.workload import Workload

from ... import recording
from ...chain import ROOT, electives
from ...console import wide_console
from ...drawing.chart import bars
from . import roofline
from .contenders import Contender, contenders, of_tree
from .pages import refresh_pages, summary_of
from .roofline import Roofline
from .workloads import WORKLOADS, workload

DEFAULT_WORKLOADS = ("alone", "batch")
FAILURES = (OSError, RuntimeError, ValueError)  # of one engine: the others are still measured


def report(name: str, measured: list[Contender], floor: Roofline, sampling: str) -> Table:
    """Return the table of one workload, for a terminal. sampling: of all engines, in words."""
    table = summary_table(
        f"{name}: {summary_of(name)} Every engine: {sampling}.",
        "engine", "tokens/s", "ratio", "of floor", "TTFT p50/p95 s", "ITL p50/p95 ms",
        "gap ms", "padding", "KV unused", "reused",
    )  # fmt: skip
    first: float | None = None
    for contender in measured:
        summary = contender.summary(name)
        if summary is None:
            continue
        first = first or summary.tokens_per_second
        stats, inter = summary.stats, summary.inter_token
        of_floor = (floor.seconds(r) / r.seconds for r in contender.results[name] if stats)
        table.add_row(
            contender.name,
            f"{summary.tokens_per_second:.1f}",
            f"{summary.tokens_per_second / first:.2f}",
            f"{median(of_floor):.0%}" if stats else "",
            f"{summary.first_token[0]:.2f} / {summary.first_token[1]:.2f}",
            f"{inter[0] * 1e3:.0f} / {inter[1] * 1e3:.0f}" if inter else "",
            "" if summary.gap is None else f"{summary.gap * 1e3:.2f}",
            str(stats.get("padding_tokens", "")),
            "" if summary.kv_waste is None else f"{summary.kv_waste:.0%}",
            str(stats.get("cached_prompt_tokens", "")),
        )
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones bench`."""
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, "all"],
        help=f"can be given several times (default: {' and '.join(DEFAULT_WORKLOADS)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float,
        help="of all engines (default: greedy, but 0.6 for nano on a GPU, as nano-vllm has it)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization", choices=["auto", "none"], default="auto",
        help="of the milestones: none computes with the weights in float32 (default: as stored)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", help="measure only these engines, such as m5_overlap,speculative"
    )
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH",
        help="also measure vLLM: the Python of an environment that has vLLM",
    )  # fmt: skip
    parser.add_argument(
        "--llama-python", type=Path, metavar="PATH",
        help="also measure llama.cpp: the Python of an environment that has xllamacpp and gguf",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path,
        help="write all measurements to this file; its entries for other workloads are kept",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="draw tokens/s as bars into this file")
    parser.add_argument(
        "--readme", action="store_true", help="write the results into the README and SPEED.md"
    )


def main(args: argparse.Namespace) -> int:
    """Measure and report. After Ctrl-C, report what was measured. Leave out failed engines."""
    console = wide_console()
    wanted = args.workload or list(DEFAULT_WORKLOADS)
    names = list(WORKLOADS) if "all" in wanted else list(dict.fromkeys(wanted))
    measured = contenders(args.model, args.vllm_python, args.llama_python)
    if args.engines:
        known = {c.name: c for c in (*measured, *map(of_tree, electives()))}
        engines = args.engines.split(",")
        if unknown := [name for name in engines if name not in known]:
            console.print(f"unknown engine: {', '.join(unknown)}; there are {', '.join(known)}")
            return 2
        measured = [known[name] for name in engines]
    loaded = load_model(EngineConfig(model=args.model, quantization=args.quantization))
    floor, on_gpu = roofline.measure(loaded.model), loaded.model.device.type == "cuda"
    vocab_size, earlier = loaded.vocab_size, _earlier(args.json, args.quantization)
    failed: list[Contender] = []
    del loaded
    works = {
        name: workload(name, args.model, vocab_size, on_gpu, args.temperature, args.quantization)
        for name in names
    }
    try:
        for number in range(1, args.rounds + 1):
            for name in names:
                work = works[name]
                for contender in (c for c in measured if c not in failed):
                    console.print(
                        f"round {number} of {args.rounds}: {name}, {contender.name}", style="dim"
                    )
                    try:
                        result = contender.run(work)
                    except FAILURES as error:
                        console.print(f"{contender.name} failed; the bench leaves it out: {error}")
                        failed.append(contender)
                        continue
                    contender.results.setdefault(name, []).append(result)
                    if args.json:
                        document = _document(measured, floor, earlier, works, args.quantization)
                        _write(args.json, document)
    except KeyboardInterrupt:
        console.print("interrupted: the tables show what was measured so far")
    finally:
        for contender in measured:
            contender.close()
    names = [name for name in names if any(name in c.results for c in measured)]
    console.print(
        f"{machine()}: reads {floor.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{floor.flops_per_second / 1e9:.0f} GFLOP/s; a decode step takes at least "
        f"{floor.step_seconds(1) * 1e3:.1f} ms for one request, "
        f"{floor.step_seconds(16) * 1e3:.1f} ms for 16"
    )
    for name in names:
        console.print(report(name, measured, floor, works[name].sampling))
    document = _document(measured, floor, earlier, works, args.quantization)
    if args.svg:
        args.svg.write_text(bars(document), encoding="utf-8")
    if args.readme:
        refresh_pages(document)
    return 0 if names and not failed else 1


def _document(
    measured: list[Contender],
    floor: Roofline,
    before: dict[str, Any],
    works: dict[str, Workload],
    quantization: str,
) -> dict[str, Any]:
    """Return all measurements so far, with those of an earlier run for other workloads."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    fresh = {
        contender.name: {
            name: {
                **asdict(summary),
                "sampling": works[name].sampling,
                "seconds": [result.seconds for result in contender.results[name]],
            }
            for name in contender.results
            if (summary := contender.summary(name)) is not None
        }
        for contender in measured
    }
    replaced = {name for of_engine in fresh.values() for name in of_engine}
    engines = {
        engine: {name: entry for name, entry in of_engine.items() if name not in replaced}
        for engine, of_engine in before.get("engines", {}).items()
    }
    for engine, of_engine in fresh.items():
        engines.setdefault(engine, {}).update(of_engine)
    return {
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit.stdout.strip(),
        "quantization": quantization,
        "roofline": asdict(floor),
        "engines": {engine: of_engine for engine, of_engine in engines.items() if of_engine},
    }


def _earlier(path: Path | None, quantization: str) -> dict[str, Any]:
    """Return the results of an earlier run on this machine, with the weights in the same precision.

    Returns an empty dict if there are none.
    """
    if path is None or not path.exists():
        return {}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    same = document["machine"] == machine() and document.get("quantization") == quantization
    return document if same else {}


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write the file completely or not at all."""
    unfinished = path.with_suffix(".part")
    recording.write(unfinished, document)
    unfinished.replace(path)
