"""Write measured results into the pages of the project that show them."""

from __future__ import annotations

from typing import Any

from ...chain import ROOT
from .workloads import WORKLOADS

MARKS = ("<!-- ladder -->", "<!-- /ladder -->")  # around the results in a page
README_COLUMNS = ("alone", "batch", "shared")


def refresh_pages(document: dict[str, Any]) -> None:
    """Write the results between the marks of the pages: all of them, and the README's columns."""
    measured = document["engines"].values()
    names = [name for name in WORKLOADS if any(name in results for results in measured)]
    few = [name for name in names if name in README_COLUMNS]
    of_columns = [f"- `{name}`: {summary_of(name)}" for name in names]
    for page, lines in {
        "README.md": table_of(document, few),
        "milestones/docs/SPEED.md": [*table_of(document, names), "", *of_columns],
    }.items():
        path, (start, end) = ROOT / page, MARKS
        before, rest = path.read_text(encoding="utf-8").split(start)
        after = rest.split(end)[1]
        text = "\n".join(lines)
        path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def table_of(document: dict[str, Any], names: list[str]) -> list[str]:
    """Return the lines of a table: tokens per second by engine and workload."""
    lines = [
        f"Output tokens per second, SmolLM2-135M, {document['machine']}:",
        "",
        f"| engine | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for engine, measured in document["engines"].items():
        cells = [
            f"{measured[name]['tokens_per_second']:.1f}" if name in measured else "-"
            for name in names
        ]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return lines


def summary_of(workload: str) -> str:
    """Return the first line of the docstring of a workload."""
    return str(WORKLOADS[workload].__doc__).split("\n", 1)[0]
