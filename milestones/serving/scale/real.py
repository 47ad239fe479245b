"""`scale measure` and `scale kill`: real replicas on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from common import EngineConfig
from common.displays.demo import machine

from ..server.settings import ServerSettings
from .kill import kill_under_load
from .measure import (
    MAX_NUM_SEQS,
    STEP_MS,
    STEP_TOKENS,
    WORKLOADS,
    Counted,
    emulated_steps,
    run_real,
    run_simulated,
)
from .policy import POLICIES, make_policy
from .ray_replicas import RayReplicas, started_replicas
from .serve import FrontServer
from .settings import ScaleSettings

VOCABULARY = 250  # ids that every model has, also the tiny ones


@contextmanager
def running_front(
    milestone: str, config: EngineConfig, num_replicas: int
) -> Iterator[tuple[FrontServer, RayReplicas]]:
    """Run a front with replicas in this process, on a free port."""
    settings = ServerSettings(port=0)
    with started_replicas(
        milestone, config, settings, ScaleSettings(replicas=num_replicas)
    ) as replicas:
        server = FrontServer(replicas, settings)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the front has not started")
                time.sleep(0.01)
            yield server, replicas
        finally:
            server.should_exit = True
            thread.join()


def measure(args: argparse.Namespace, console: Console) -> int:
    """Measure each policy on each workload, beside the simulator."""
    found = []
    config = EngineConfig(
        model=args.model, max_num_seqs=MAX_NUM_SEQS, device="cpu",
        emulated_forward_ms=STEP_MS, max_num_batched_tokens=STEP_TOKENS,
    )  # fmt: skip
    for num_replicas in args.replicas or (2, 4):
        with running_front(args.milestone, config, num_replicas) as (server, replicas):
            described = asyncio.run(replicas.learn())
            for name, workload in WORKLOADS.items():
                work = workload(VOCABULARY, seed=num_replicas)
                asyncio.run(run_real(server.address, described.model, work[:8]))  # warms up
                runs: dict[str, list[Counted]] = {policy: [] for policy in POLICIES}
                for _ in range(args.rounds):
                    for policy in POLICIES:
                        asyncio.run(replicas.reset(make_policy(policy)))
                        real = asyncio.run(run_real(server.address, described.model, work))
                        runs[policy].append(real)
                        console.print(f"{num_replicas} {name} {policy}: {real.hit_rate:.3f}")
                for policy, several in runs.items():
                    simulated = run_simulated(
                        work, policy, num_replicas, described.num_pages, emulated_steps()
                    )
                    found.append(
                        {
                            "replicas": num_replicas, "workload": name, "policy": policy,
                            "hit_rate": round(median(one.hit_rate for one in several), 4),
                            "simulated": round(simulated, 4),
                            "ttft_mean": round(median(mean(one.first) for one in several), 4),
                        }
                    )  # fmt: skip
    console.print(_table(found))
    if args.json:
        document = {"machine": machine(), "model": args.model, "rounds": args.rounds, "rows": found}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def kill(args: argparse.Namespace, console: Console) -> int:
    """Kill replicas under load. Exit status 1 if a stream had no end, or two answers."""
    config, num_replicas = EngineConfig(model=args.model), max(2, *(args.replicas or (2,)))
    with running_front(args.milestone, config, num_replicas) as (server, _):
        ends = asyncio.run(kill_under_load(server.address, server.model, args.times))
        retried = server.front.calls.retried
    console.print(f"{len(ends.killed)} replicas killed; {retried} calls were sent again")
    for kind, count in ends.streams.most_common():
        console.print(f"{count} streams: {kind}")
    if args.json:
        document = {
            "machine": machine(), "killed": len(ends.killed), "retried": retried,
            "streams": dict(ends.streams),
        }  # fmt: skip
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if ends.wrong else 0


def _table(found: list[dict[str, Any]]) -> Table:
    """Return the rows; TTFT as a ratio to that of round robin in the same run."""
    shown = Table(title=f"Replicas on {machine()}")
    for name in ("replicas", "workload", "policy", "hit rate", "simulated", "TTFT / round robin"):
        shown.add_column(name, justify="right")
    base = {(row["replicas"], row["workload"]): row["ttft_mean"] for row in found
            if row["policy"] == "round-robin"}  # fmt: skip
    for row in found:
        ratio = row["ttft_mean"] / base[row["replicas"], row["workload"]]
        shown.add_row(
            str(row["replicas"]), row["workload"], row["policy"], f"{row['hit_rate']:.3f}",
            f"{row['simulated']:.3f}", f"{ratio:.2f}",
        )  # fmt: skip
    return shown
