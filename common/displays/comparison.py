"""The same requests on several engines, and their results side by side."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ..clock import StepCosts
from ..llm_engine import LLMEngine
from .shapes import summary_table
from .workload import Workload, WorkloadResult
from .workload_process import run_milestone

Figure = Callable[[WorkloadResult], str]  # what a row of the table shows of a result


def workload_of(
    engine: LLMEngine,
    prompts: list[list[int]],
    args: Namespace,
    costs: StepCosts | None = None,
) -> Workload:
    """Return these prompts as a workload: all arrive at once, with the engine's configuration.

    costs: of the virtual time in which it runs. None: the machine's time.
    """
    config = {**vars(engine.config), "model": engine.loaded.name}
    made = Workload(prompts, [args.max_tokens] * len(prompts), config=config)
    made.costs = None if costs is None else asdict(costs)
    return made


def run_milestones(workloads: dict[str, Workload], console: Console) -> dict[str, WorkloadResult]:
    """Run a workload on each milestone, each in a process of its own.

    The result has no entry for a milestone that is not installed: the tree that a student gets
    may lack it.
    """
    results = {}
    for milestone, workload in workloads.items():
        with console.status(f"the same requests on {milestone} …"):
            if (result := run_milestone(milestone, workload)) is not None:
                results[milestone] = result
    return results


def comparison(
    title: str,
    results: dict[str, WorkloadResult],
    figures: dict[str, Figure],
    costs: StepCosts | None = None,
    shows_machine: bool = True,
) -> Table:
    """Return a table with a column for each result; the last rows compare the throughput.

    costs: of the virtual time in which they ran. They stand below the table.
    shows_machine: whether the seconds of the machine stand there, too.
    """
    table = summary_table(f"\n{title}", "", *results)
    if costs is not None:
        took = ", ".join(seconds(result.machine_seconds) for result in results.values())
        table.caption = f"virtual time: {costs}" + f"\nthis machine took {took}" * shows_machine
        table.caption_justify = "left"
    first = next(iter(results.values())).tokens_per_second
    rows = {
        **figures,
        "throughput": lambda r: f"{r.tokens_per_second:.1f} tokens/s",
        "ratio": lambda r: f"{r.tokens_per_second / first:.2f} x",
    }
    for name, figure in rows.items():
        table.add_row(name, *map(figure, results.values()))
    return table


def counter(name: str) -> Figure:
    """Return a figure that shows a counter of `EngineStats`."""
    return lambda result: str(result.stats[name])


def seconds(value: float) -> str:
    """Return a time in words: milliseconds below one second."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.2f} s"
