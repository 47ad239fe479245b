"""A part of the demos of several electives: a table beside m5."""

from __future__ import annotations

from rich.console import Console

from common.clock import StepCosts
from common.displays.comparison import Figure, comparison, run_milestones
from common.displays.workload import Workload

from ..chain import below, package


def compare(
    name: str,
    workload: Workload,
    figures: dict[str, Figure],
    console: Console,
    title: str = "all requests at once",
) -> None:
    """Serve requests on both engines, each in a process of its own, and print a table.

    name: the elective. workload: with the costs of virtual time.
    """
    milestone = below(name)
    assert milestone is not None, "an elective lies on a milestone"
    results = run_milestones(dict.fromkeys((package(milestone), package(name)), workload), console)
    named = {engine.rpartition(".")[2]: result for engine, result in results.items()}
    assert workload.costs is not None, "the demos of electives are in virtual time"
    console.print(comparison(title, named, figures, StepCosts(**workload.costs)))
