"""Show the results of the exercises: a list, and then the first failure in words."""

from __future__ import annotations

import textwrap

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..testing.results import Failure, Result
from .attempt import Attempt
from .failure_words import (
    called_unwritten,
    facts,
    name_of,
    notes,
    outcome_of,
    rest_in_words,
    unwritten_words,
)

STYLES = {"passed": "green", "failed": "red", "not written": "yellow", "not run": "dim"}
FACTS = {"": "", "message": "bold", "wrong": "red", "right": "green"}  # styles
MOST_PRINTED = 12  # lines


def show_attempts(console: Console, attempts: list[Attempt], trace: bool = False) -> None:
    """Print the list, the first failure, and what to do next."""
    console.print(attempts_table(attempts))
    stopped = next((a for a in attempts if a.state not in ("passed", "not run")), None)
    if stopped is None:
        points = sum(attempt.exercise.points for attempt in attempts)
        many = "All exercises pass" if len(attempts) > 1 else f"{attempts[0].exercise.id} passes"
        console.print(f"\n{many}: {points} points.", style="green", highlight=False)
        return
    console.print()
    if stopped.run is None:
        console.print(Text(unwritten_words(stopped, stopped.absent), style="yellow"))
        show_next(console, stopped, trace)
        return
    first = stopped.run.first_failure
    if stopped.run.error:
        console.print("The tests stopped with an error:", style="red")
        console.print(stopped.run.error, highlight=False, markup=False)
        if first is None:
            return
        console.print()
    assert first is not None
    console.print(failure_in_words(stopped, first))
    if lines := first.printed.splitlines()[-MOST_PRINTED:]:
        console.print("\nThe end of what it printed:", style="dim")
        console.print(textwrap.indent("\n".join(lines), "  "), highlight=False, markup=False)
    for line in rest_in_words(stopped.run):
        console.print(line, highlight=False, markup=False)
    if trace and first.failure:
        console.print()
        console.print(first.failure.trace, highlight=False, markup=False)
    show_next(console, stopped, trace)


def show_next(console: Console, attempt: Attempt, trace: bool) -> None:
    """Print the commands that may help now."""
    console.print()
    for line in what_next(attempt, trace):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def attempts_table(attempts: list[Attempt]) -> Table:
    """Return a row for each exercise."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for attempt in attempts:
        exercise, state = attempt.exercise, attempt.state
        results = attempt.run.results if attempt.run else ()
        count = sum(result.passed == (state == "passed") for result in results)
        told = bool(results) and state in ("passed", "failed")
        left = len(attempt.run.not_run) if attempt.run else 0
        tests = f"{count} of {len(results) + left} tests" if told else ""
        table.add_row(
            Text(exercise.id, style="bold" if state != "not run" else "dim"),
            Text(exercise.title, style="dim" if state == "not run" else ""),
            Text(f"{exercise.points} points", style="dim"),
            Text.assemble((state, STYLES[state]), (f"  {tests}" if tests else "", "dim")),
        )
    return table


def failure_in_words(attempt: Attempt, result: Result) -> RenderableType:
    """Describe a test that failed: what was called, what was returned, what was expected."""
    if words := called_unwritten(attempt, result):
        return Text(words, style="yellow")
    failure = result.failure or Failure("unknown")
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{attempt.exercise.id}  ", "bold"), (name_of(result), "bold red"),
            f" {outcome_of(result)}",
        )
    ]  # fmt: skip
    if result.title:
        parts.append(Text(result.title, style="italic"))
    parts.append(Padding(facts_table(failure, attempt.caller), (1, 0, 0, 2), expand=False))
    for line in notes(attempt, result):
        parts.append(Padding(Text(line), (1, 0, 0, 2), expand=False))
    return Group(*parts)


def facts_table(failure: Failure, caller: str | None) -> Table:
    """Return the facts of a failure in two columns. caller: see `Attempt`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts(failure, caller):
        table.add_row(fact.name, Text(fact.value, style=FACTS[fact.kind]))
    return table


def what_next(attempt: Attempt, trace: bool) -> list[str]:
    """Return the commands that may help now."""
    exercise = attempt.exercise
    lines = [
        f"The handout:   {exercise.section}",
        f"A hint:        python -m milestones hint {exercise.id}",
    ]
    if attempt.state == "failed" and not trace:
        lines.append(f"The traceback: python -m milestones check {exercise.id} --trace")
        lines.append(f"A debugger:    python -m milestones check {exercise.id} --debug")
    return lines


def show_syntax_error(console: Console, error: Failure) -> None:
    """Show a syntax error: its place, its message and the line."""
    console.print(f"{error.where}: {error.message}", style="red", highlight=False)
    if error.source:
        console.print(Text(textwrap.indent(error.source, "    ")))
