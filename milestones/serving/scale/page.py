"""The tables of SCALING.md, from the recorded results: `python -m milestones scale page`.

A command that measures shows its rows by the same functions. `sizing` is arithmetic: how many
replicas some users need, from a step model and a hit rate.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .steps import StepModel, load_steps

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESULTS = DOCS / "SCALING.md", DOCS / "results"
USERS = (1000, 1_000_000)
MIDDLE = 64  # replicas, in the simulations that give the hit rates of the sizing
UTILIZATION = 0.6  # of a replica: the rest is for bursts, and for the requests of a dead replica
SECONDS_PER_REQUEST = 60.0  # of one active user
PROMPT_TOKENS, OUTPUT_TOKENS = 960, 128  # the means of `Traffic`
RUNNING = 16  # requests that decode together
GPU = "an H200 with a model of 8 billion weights in bfloat16, by arithmetic"
Cells = tuple[Sequence[str], list[list[str]]]  # the names of the columns, and the rows


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


def markdown(cells: Cells) -> str:
    """Return a table as a page has it."""
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def on_screen(title: str, cells: Cells) -> Table:
    """Return the same table for a terminal."""
    shown = Table(title=title)
    for name in cells[0]:
        shown.add_column(name, justify="right")
    for row in cells[1]:
        shown.add_row(*row)
    return shown


def _killed(found: dict[str, Any]) -> str:
    ends = ", ".join(f"{count} {kind}" for kind, count in found["streams"].items())
    counts = f"{found['killed']} replicas were killed, and {found['retried']} calls sent again."
    return (
        f"One run on {found['machine']}:\n{counts} The streams ended so:\n{ends}. "
        "No stream was without an end, and none was answered twice.\n"
    )


def measured_rows(found: Sequence[dict[str, Any]]) -> Cells:
    """Return the rows of `scale measure`; TTFT as a ratio to round robin in the same run."""
    base = {
        (row["replicas"], row["workload"]): row["ttft_mean"]
        for row in found
        if row["policy"] == "round-robin"
    }
    rows = [
        [
            str(row["replicas"]), row["workload"], row["policy"], f"{row['hit_rate']:.3f}",
            f"{row['simulated']:.3f}",
            f"{row['ttft_mean'] / base[row['replicas'], row['workload']]:.2f}",
        ]
        for row in found
    ]  # fmt: skip
    head = ("replicas", "workload", "policy", "hit rate", "simulated", "mean TTFT / round robin")
    return head, rows


def _measured(found: dict[str, Any]) -> str:
    return (
        f"One run on {found['machine']}, {found['model']} on emulated devices.\nThe medians "
        f"of {found['rounds']} rounds; the machine did other work at the same time.\n\n"
        f"{markdown(measured_rows(found['rows']))}"
    )


def rank_rows(found: Sequence[dict[str, Any]]) -> Cells:
    """Return the rows of `scale ranks`, as ratios to one process."""
    keys = ("first", "step", "own")
    head = ("work", "first step", "decode step", "without collective operations")
    return head, [[row["work"], *(f"{row[key]:.2f}" for key in keys)] for row in found]


def _ranks(found: dict[str, Any]) -> str:
    alone, divided = found["memory"]
    weights = [side["weights"] / 1e9 for side in (divided, alone)]
    return (
        f"One run on {found['machine']}, {found['model']}, m5_overlap, one thread for each process."
        f"\nMedians of {found['rounds']} paired runs: {found['ranks']} ranks / one process.\n\n"
        f"{markdown(rank_rows(found['rows']))}\n"
        f"A rank has {weights[0]:.2f} of {weights[1]:.2f} GB of weights, and "
        f"{divided['kv_per_token']:,} of {alone['kv_per_token']:,} bytes of keys and values for "
        "each token.\n"
    )


def simulated_rows(points: Sequence[dict[str, Any]]) -> Cells:
    """Return the rows of `scale simulate`."""
    rows = []
    for one in points:
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
    return head, rows


def _simulated(found: dict[str, Any]) -> str:
    total = sum(one["num_requests"] for one in found["points"])
    return (
        f"{total:,} requests in all. Steps as measured on {found['step model']}.\n\n"
        f"{markdown(simulated_rows(found['points']))}"
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
    return markdown((head, rows))


@dataclass(frozen=True)
class Sizing:
    """What one replica can do, at a hit rate."""

    hit_rate: float
    seconds: float  # of a replica for each request

    @property
    def users(self) -> float:
        """Return the users of one replica."""
        return UTILIZATION * SECONDS_PER_REQUEST / self.seconds

    def replicas(self, users: int) -> int:
        """Return the replicas that this many users need."""
        return math.ceil(users / self.users)


def sizing(steps: StepModel, hit_rate: float, running: int = RUNNING) -> Sizing:
    """Return the sizing at a hit rate, with `running` requests that decode together."""
    prefill = steps.prefill_seconds((1 - hit_rate) * PROMPT_TOKENS)
    return Sizing(hit_rate, prefill + OUTPUT_TOKENS * steps.decode_seconds(running) / running)


def gpu_steps(
    bytes_per_second: float = 4.3e12,
    flops_per_second: float = 0.5 * 790e12,
    num_weights: float = 8e9,
    kv_bytes: float = 131_072,
    context: float = PROMPT_TOKENS + OUTPUT_TOKENS / 2,
) -> StepModel:
    """Return a step model by arithmetic. It is a lower bound of the time, and no measurement.

    A decode step reads all weights and the keys and values of all requests; a prefill multiplies
    each weight once for each token, at half of the machine's best speed. kv_bytes: of one token in
    all layers (32 layers, 8 KV heads of 128, keys and values, 2 bytes).
    """
    weights = 2 * num_weights / bytes_per_second
    decode = [(n, weights + n * context * kv_bytes / bytes_per_second) for n in (1, 16, 64, 256)]
    prefill = [(1, weights)]
    prefill += [(n, max(weights, 2 * num_weights * n / flops_per_second)) for n in (64, 256, 2048)]
    return StepModel(GPU, decode, prefill)


def all_reduce_bytes(hidden: int, ranks: int, itemsize: int = 2) -> float:
    """Return the bytes that one rank sends for one token in one layer of tensor parallelism.

    A layer has two all-reduces of the hidden state, after attention and after the MLP. A ring sends
    2 (n - 1) / n times the size.
    """
    return 2 * 2 * (ranks - 1) / ranks * hidden * itemsize
