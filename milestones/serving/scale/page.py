"""The tables of SCALING.md, from the recorded results: `python -m milestones scale page`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .sizing import gpu_steps, sizing
from .steps import load_steps

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = DOCS / "SCALING.md", DOCS / "results"
USERS = (1000, 1_000_000)
MIDDLE = 64  # replicas, in the simulations that give the hit rates of the sizing


def tables() -> dict[str, str]:
    """Return the text between the markers of each table."""
    simulated, measured, killed, ranks = (
        json.loads((RESULTS / f"scale_{name}.json").read_text(encoding="utf-8"))
        for name in ("simulated", "measured", "killed", "ranks")
    )
    return {
        "kill": _killed(killed),
        "measured": _measured(measured),
        "simulated": _simulated(simulated),
        "sizing": _sizing(simulated["points"]),
        "ranks": _ranks(ranks),
    }


def with_tables(page: str) -> str:
    """Return the page with the tables between its markers."""
    for name, text in tables().items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert between.search(page), f"no markers for {name}"
        page = between.sub(lambda found, text=text: found[1] + text + found[2], page)  # type: ignore[misc]
    return page


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _killed(found: dict[str, Any]) -> str:
    ends = ", ".join(f"{count} {kind}" for kind, count in found["streams"].items())
    counts = f"{found['killed']} replicas were killed, and {found['retried']} calls sent again."
    return (
        f"One run on {found['machine']}:\n{counts} The streams ended so:\n{ends}. "
        "No stream was without an end, and none was answered twice.\n"
    )


def _measured(found: dict[str, Any]) -> str:
    base = {
        (row["replicas"], row["workload"]): row["ttft_mean"]
        for row in found["rows"]
        if row["policy"] == "round-robin"
    }
    rows = [
        [
            str(row["replicas"]), row["workload"], row["policy"], f"{row['hit_rate']:.3f}",
            f"{row['simulated']:.3f}",
            f"{row['ttft_mean'] / base[row['replicas'], row['workload']]:.2f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    head = ("replicas", "workload", "policy", "hit rate", "simulated", "mean TTFT / round robin")
    return (
        f"One run on {found['machine']}, {found['model']} on emulated devices.\nThe medians "
        f"of {found['rounds']} rounds; the machine did other work at the same time.\n\n"
        f"{_rows(head, rows)}"
    )


def _ranks(found: dict[str, Any]) -> str:
    alone, divided = found["memory"]
    keys = ("first", "step", "own")
    rows = [[row["work"], *(f"{row[key]:.2f}" for key in keys)] for row in found["rows"]]
    head = ("work", "first step", "decode step", "without collective operations")
    weights = [side["weights"] / 1e9 for side in (divided, alone)]
    return (
        f"One run on {found['machine']}, {found['model']}, m5_overlap, one thread for each process."
        f"\nMedians of {found['rounds']} paired runs: {found['ranks']} ranks / one process.\n\n"
        f"{_rows(head, rows)}\n"
        f"A rank has {weights[0]:.2f} of {weights[1]:.2f} GB of weights, and "
        f"{divided['kv_per_token']:,} of {alone['kv_per_token']:,} bytes of keys and values for "
        "each token.\n"
    )


def _simulated(found: dict[str, Any]) -> str:
    rows = []
    for one in found["points"]:
        delay = "never" if one["report_delay"] is None else f"{one['report_delay']:g} s"
        rows.append(
            [
                str(one["replicas"]), one["policy"], f"{one['skew']:g}", delay,
                str(one["num_pages"]), str(one["believed_pages"]),
                f"{one['hit_rate']:.3f}", f"{one['spread']:.2f}",
                f"{one['most_open']:.2f}", f"{one['ttft_p50']:.2f} s", f"{one['ttft_p99']:.2f} s",
            ]
        )  # fmt: skip
    head = ("replicas", "policy", "skew", "report after", "pages", "as believed", "hit rate",
            "most sent", "most open", "TTFT p50", "TTFT p99")  # fmt: skip
    total = sum(one["num_requests"] for one in found["points"])
    return (
        f"{total:,} requests in all. Steps as measured on {found['step model']}.\n\n"
        f"{_rows(head, rows)}"
    )


def _sizing(points: Sequence[dict[str, Any]]) -> str:
    rates: dict[str, float] = {}
    for one in points:
        if one["replicas"] == MIDDLE:
            rates.setdefault(one["policy"], one["hit_rate"])
    rows = []
    for steps, running in ((load_steps(), 16), (gpu_steps(), 64)):
        for policy in ("prefix", "round-robin"):
            found = sizing(steps, rates[policy], running)
            rows.append(
                [
                    steps.machine, policy, f"{rates[policy]:.2f}", f"{1000 * found.seconds:.0f} ms",
                    *(f"{found.replicas(users):,}" for users in USERS),
                ]
            )  # fmt: skip
    head = ("replica", "policy", "hit rate", "time per request",
            *(f"{users:,} users" for users in USERS))  # fmt: skip
    return _rows(head, rows)
