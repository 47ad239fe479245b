"""Show the results of the exercises: a list, and then the first failure in words."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..exercise import Exercise
from ..testing.results import Failure, Result, Run

INVARIANTS = {
    1: ("One answer", "Greedy output equals that of Hugging Face's `generate`, token for token."),
    2: ("Batch invariance", "A request's tokens depend only on the request itself."),
    3: ("Nothing leaks", "A request that is done, aborted or failed holds no memory."),
    4: ("Bad input is refused, alone", "The error names field and limit. Other requests go on."),
    5: ("Progress", "Any admitted request finishes. None is overtaken for ever."),
    6: ("Text is whole", "No half characters, no start of a stop string. The pieces join."),
}
State = Literal["passed", "failed", "not written", "not run"]
STYLES = {"passed": "green", "failed": "red", "not written": "yellow", "not run": "dim"}
LONGEST_EXPLANATION = 6  # lines
MOST_PRINTED = 12  # lines
MOST_OTHERS = 5  # names of other tests that fail
LONGEST_PARAMETERS = 30  # characters of the name of a test
CALL = re.compile(r"\w\(")
CRASHED_KERNEL = "A load or store outside of a tensor can cause this: look at the masks."
OUTCOMES = {"timeout": "does not end", "crashed": "ended its process", "error": "cannot be run"}


@dataclass(frozen=True)
class Attempt:
    """An exercise, and the results of its tests (None: they were not run)."""

    exercise: Exercise
    run: Run | None = None
    unwritten: tuple[str, ...] = ()  # its functions that the student has not written yet
    caller: str | None = None  # its function that called the given code which failed: `own_code`
    absent: str = ""  # this exercise, or one that it needs, if nothing of it is written

    @property
    def state(self) -> State:
        if self.absent:
            return "not written"
        if self.run is None:
            return "not run"
        if self.run.passed:
            return "passed"
        first = self.run.first_failure
        return "not written" if first is not None and first.unwritten else "failed"


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
        console.print(not_written_in_words(stopped, stopped.absent))
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


def not_written_in_words(attempt: Attempt, absent: str) -> Text:
    """Say what is not written: functions of the exercise, or another exercise that it needs."""
    exercise = attempt.exercise
    if absent == exercise.id:
        said = f"{exercise.id} is not written yet: {', '.join(attempt.unwritten)}"
    else:
        said = f"{exercise.id} needs {absent}, which is not written yet"
    return Text(said, style="yellow")


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
    exercise, failure = attempt.exercise, result.failure or Failure("unknown")
    if result.unwritten:
        own = exercise.id in result.unwritten
        return not_written_in_words(attempt, exercise.id if own else result.unwritten[0])
    name = name_of(result)
    outcome = OUTCOMES.get(result.outcome, "fails")
    head = Text.assemble((f"{exercise.id}  ", "bold"), (name, "bold red"), f" {outcome}")
    parts: list[RenderableType] = [head]
    if result.title:
        parts.append(Text(result.title, style="italic"))
    parts.append(Padding(facts(failure, attempt.caller), (1, 0, 0, 2), expand=False))
    if result.outcome == "crashed" and any("kernels.py:" in name for name in exercise.symbols):
        parts.append(Padding(Text(CRASHED_KERNEL, style="italic"), (1, 0, 0, 2), expand=False))
    parts += [Padding(Text(line), (1, 0, 0, 2), expand=False) for line in invariant_lines(failure)]
    return Group(*parts)


def rest_in_words(run: Run) -> list[str]:
    """Return the names of the other tests that failed, and the numbers of those without a result.

    A test that does not end has a reason of its own, which the first failure may not explain.
    """
    lines = []
    for result in run.failures[1:]:
        if not result.unwritten:
            where = result.failure and result.failure.where
            how = f" {OUTCOMES[result.outcome]}" if result.outcome in OUTCOMES else ""
            how += f", at {where}" if how and where else ""
            lines.append(f"  {name_of(result)}{how}")
    if (more := len(lines) - MOST_OTHERS) > 0:
        lines[MOST_OTHERS:] = [f"  and {more} more"]
    lines = ["\nThese tests fail too:", *lines] if lines else []
    unwritten = [bool(result.unwritten) for result in run.failures]
    if (count := sum(unwritten)) and not unwritten[0]:  # the first one is explained above
        many = "1 more test calls" if count == 1 else f"{count} more tests call"
        lines.append(f"\n{many} a function that is not written yet")
    if run.not_run:
        count = len(run.not_run)
        many = "1 test was" if count == 1 else f"{count} tests were"
        lines.append(f"\n{many} not run after the test that does not end")
    return lines


def name_of(result: Result) -> str:
    """Return the name of a test on one line, without the middle of long parameters."""
    name, bracket, parameters = result.node.rpartition("::")[2].partition("[")
    parameters = " ".join(parameters.split())
    if len(parameters) > LONGEST_PARAMETERS:
        half = LONGEST_PARAMETERS // 2
        parameters = f"{parameters[:half]} … {parameters[-half:]}"
    return name + bracket + parameters


def facts(failure: Failure, caller: str | None) -> Table:
    """Return the facts of a failure in two columns. caller: see `Attempt`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: str | None, style: str = "") -> None:
        if value:
            table.add_row(name, Text(value, style=style))

    if failure.kind in ("AssertionError", "Failed"):
        row("message", failure.message, "bold")
        compared = failure.expected is not None
        name = "called" if CALL.search(failure.called or "") else "value"
        row(name if compared else "asserted", failure.called)
        row("result", failure.returned, "red")
        row("expected", failure.expected, "green")
        if not compared and not failure.message:
            lines = failure.explanation.splitlines()[:LONGEST_EXPLANATION]
            row("but", "\n".join(lines), "red")
    else:
        row("called", failure.called)
        if failure.kind in ("timeout", "crashed"):
            row("but", failure.message, "red")
        else:
            row("raised", ": ".join(filter(None, (failure.kind, failure.message))), "red")
        row("", failure.source)
    row("example", failure.example)
    if caller is None:
        row("your code", failure.where)
    else:
        row("given code", f"{failure.where}, called by your {caller}" if caller else failure.where)
    row("the test", failure.test_line)
    row("stacks", failure.stacks)
    return table


def invariant_lines(failure: Failure) -> list[str]:
    """Return the invariants that a failure names, in words."""
    return [
        f"I{number} {INVARIANTS[number][0]}. {INVARIANTS[number][1]}"
        for number in invariants_in(failure.message)
    ]


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


def invariants_in(text: str) -> list[int]:
    """Return the numbers of the invariants that a message names."""
    return sorted({int(number) for number in re.findall(r"\bI([1-6])\b", text)})
