"""The serial loop beside the overlapped loop: on this machine, and in virtual time."""

from __future__ import annotations

import os
from statistics import mean

from rich.console import Console

from common import LoadedModel
from common.clock import StepCosts
from common.displays.comparison import Figure, comparison, counter, seconds
from common.displays.demo import say
from common.displays.workload import Workload, WorkloadResult, percentile

from .lanes import Lanes
from .loops import LOOPS, run_loop

ON_GPU = "The GPU computes the forwards while the host works."
ON_CPU = (
    f"The host and the forwards share the {os.cpu_count()} cores of this CPU. The time that "
    "overlapping saves is taken from the forwards, so expect a draw."
)
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "forward, mean": lambda r: f"{1e3 * mean(r.forward_seconds):.2f} ms",
    "gap between forwards, mean": lambda r: f"{mean_gap_ms(r):.2f} ms",
    "ITL p50": lambda r: f"{1e3 * percentile(r.inter_token_seconds, 50):.2f} ms",
}


def compare_on_machine(
    workload: Workload, loaded: LoadedModel, on_gpu: bool, console: Console
) -> None:
    """Run both loops in the machine's time, and say which one is faster here."""
    console.rule(f"[bold]On this {'GPU' if on_gpu else 'CPU'}", align="left")
    say(
        console,
        f"Both loops serve the {len(workload.prompts)} requests of the live run again, now all "
        "at once.",
        ON_GPU if on_gpu else ON_CPU,
    )
    results = {}
    for name, overlap in LOOPS.items():
        with console.status(f"the same requests, {name} …"):
            results[name] = run_loop(workload, overlap, loaded).result
    serial, overlapped = results.values()
    if on_gpu:
        console.print(comparison("all requests at once, on this GPU", results, FIGURES))
    else:
        say(
            console,
            f"This machine took {seconds(serial.seconds)} by the serial loop, and "
            f"{seconds(overlapped.seconds)} by the overlapped loop.",
        )


def compare_in_virtual_time(
    workload: Workload, loaded: LoadedModel, costs: StepCosts, console: Console
) -> None:
    """Run and show both loops as on a device that shares no core with the host."""
    console.rule("[bold]On a device beside the host", align="left")
    say(
        console,
        "The same requests in virtual time. The model computes every token, but the times are "
        "those of steps with forwards on a device of its own.",
    )
    loops = {}
    for name, overlap in LOOPS.items():
        with console.status(f"the same requests, {name}, in virtual time …"):
            loops[name] = run_loop(workload, overlap, loaded, costs)
    traces = {name: loop.trace for name, loop in loops.items() if loop.trace is not None}
    console.print(Lanes(traces, console).panel("lanes of both loops"))
    results = {name: loop.result for name, loop in loops.items()}
    title = "all requests at once, in virtual time"
    console.print(comparison(title, results, FIGURES, costs, shows_machine=False))
    serial, overlapped = results.values()
    same = serial.token_ids == overlapped.token_ids
    ratio = overlapped.tokens_per_second / serial.tokens_per_second
    say(
        console,
        f"The mean gap between forwards is {mean_gap_ms(serial):.2f} ms in the serial loop and "
        f"{mean_gap_ms(overlapped):.2f} ms in the overlapped loop, which serves {ratio:.2f} times "
        f"as many tokens per second. The tokens are {'the same' if same else 'NOT the same'}.",
    )


def mean_gap_ms(result: WorkloadResult) -> float:
    """Return the mean milliseconds from the end of a forward to the start of the next one."""
    return 1e3 * mean(result.gap_seconds) if result.gap_seconds else 0.0
