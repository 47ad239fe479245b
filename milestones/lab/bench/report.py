"""The results of a bench: tables for a terminal, a document for JSON, and blocks of pages."""

from __future__ import annotations

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

from common.displays.demo import machine
from common.displays.shapes import summary_table
from common.displays.workload import Workload

from ...chain import ROOT
from ...recording import write_block
from .engines import BenchEngine
from .roofline import Roofline
from .workloads import PREFILLS, WORKLOADS

README_COLUMNS = ("batch", "shared")
README_ENGINES = ("m1_single", "m5_overlap", "vllm")


def table(name: str, measured: list[BenchEngine], floor: Roofline, sampling: str) -> Table:
    """Return the table of one workload, for a terminal. sampling: of all engines, in words."""
    made = summary_table(
        f"{name}: {summary_of(name)} Every engine: {sampling}.",
        "engine", "tokens/s", "ratio", "of floor", "TTFT p50/p95 s", "ITL p50/p95 ms",
        "gap ms", "padding", "KV unused", "reused",
    )  # fmt: skip
    first: float | None = None
    for engine in measured:
        if name not in engine.results:
            continue
        summary = engine.summary(name)
        first = first or summary.tokens_per_second
        stats, inter = summary.stats, summary.inter_token
        of_floor = (floor.seconds(r) / r.seconds for r in engine.results[name] if stats)
        made.add_row(
            engine.name,
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
    return made


def document(
    measured: list[BenchEngine],
    floor: Roofline,
    before: dict[str, Any],
    works: dict[str, Workload],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Return all measurements so far, with those of an earlier run for other workloads.

    settings: of the run, under the names that the document has for them.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    fresh = {
        engine.name: {
            name: {
                **asdict(engine.summary(name)),
                "sampling": works[name].sampling,
                "seconds": [result.seconds for result in results],
            }
            for name, results in engine.results.items()
        }
        for engine in measured
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
        **settings,
        "roofline": asdict(floor),
        "engines": {engine: of_engine for engine, of_engine in engines.items() if of_engine},
    }


def earlier(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the results of an earlier run on this machine with the same settings.

    Returns an empty dict if there are none.
    """
    if path is None or not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    expected = {"machine": machine(), **settings}
    return found if expected.items() <= found.items() else {}


def refresh_pages(results: dict[str, Any]) -> None:
    """Write the results between the marks of the pages: all of them, and the README's few."""
    measured = results["engines"].values()
    found = [name for name in WORKLOADS if any(name in engine for engine in measured)]
    names = [name for name in found if name not in PREFILLS]
    few = [name for name in names if name in README_COLUMNS]
    of_columns = [f"- `{name}`: {summary_of(name)}" for name in names]
    engines = {n: e for n, e in results["engines"].items() if n in README_ENGINES}
    write_block(ROOT / "README.md", "ladder", lines_of({**results, "engines": engines}, few))
    everything = [*lines_of(results, names), "", *of_columns, *prefill_lines(results)]
    write_block(ROOT / "milestones/docs/SPEED.md", "ladder", everything)


def lines_of(results: dict[str, Any], names: list[str]) -> list[str]:
    """Return the lines of a table: tokens per second by engine and workload."""
    lines = [
        f"Output tokens per second, SmolLM2-135M, {results['machine']}:",
        "",
        f"| engine | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for engine, measured in results["engines"].items():
        cells = [
            f"{measured[name]['tokens_per_second']:.1f}" if name in measured else "-"
            for name in names
        ]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return lines


def prefill_lines(results: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the times to first tokens; none if none was measured."""
    engines = {
        engine: {name: measured[name] for name in PREFILLS if name in measured}
        for engine, measured in results["engines"].items()
    }
    if not any(engines.values()):
        return []
    floor = Roofline(**results["roofline"])
    lines = [
        "",
        "Milliseconds from a prompt to its first token, and the share of the machine's arithmetic "
        f"({floor.flops_per_second / 1e9:.0f} GFLOP/s) that this is:",
        "",
        f"| engine | {' | '.join(f'{tokens:,} prompt tokens' for tokens in PREFILLS.values())} |",
        f"|---|{'---|' * len(PREFILLS)}",
    ]
    for engine, measured in engines.items():
        seconds = {name: entry["first_token"][0] for name, entry in measured.items()}
        cells = [
            f"{seconds[name] * 1e3:.0f} ({floor.prefill_seconds(tokens) / seconds[name]:.0%})"
            if name in seconds
            else "-"
            for name, tokens in PREFILLS.items()
        ]
        lines += [f"| {engine} | {' | '.join(cells)} |"] if measured else []
    return lines


def summary_of(workload: str) -> str:
    """Return the first line of the docstring of a workload."""
    return str(WORKLOADS[workload].__doc__).split("\n", 1)[0]
