"""What a mistake does to tests and answers, and how `break` shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..exercise import Exercise
from ..testing.results import Result, Run


@dataclass(frozen=True)
class Effect:
    """What a mistake does: to the tests of its exercise, and to the answers of an engine."""

    run: Run
    right: dict[str, Any]  # the results of `engine_answers.py`, without the mistake
    wrong: dict[str, Any]  # and with it; both empty if the engine is not complete

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the tests that fail, without parameters, in order."""
        return tuple(dict.fromkeys(map(test_of, self.run.failures)))

    @property
    def answers(self) -> str:
        """Whether the answers are "right", "wrong", or the engine "stops"."""
        if any(result["error"] for result in self.wrong.values()):
            return "stops"
        same = all(self.wrong[s]["answers"] == r["answers"] for s, r in self.right.items())
        return "right" if same else "wrong"


def test_of(result: Result) -> str:
    """Return the name of a test, which may have run in several cases."""
    return result.node.rpartition("::")[2].partition("[")[0]


def compared(console: Console, exercise: Exercise, effect: Effect) -> bool:
    """Print how the effect differs from the catalog. Return whether it is the handout's mistake.

    In a solution that is written in another way, the same mistake may break more tests.
    """
    missing = [name for name in exercise.red if name not in effect.red]
    more = [name for name in effect.red if name not in exercise.red]
    other = bool(effect.right) and effect.answers != exercise.answers
    if missing:
        console.print(
            f"With the handout's mistake, these should fail, and pass: {', '.join(missing)}"
        )
    if other:
        console.print(f"With the handout's mistake, the answers are: {exercise.answers}")
    if missing or other:
        if more:
            console.print(f"These fail, and should pass: {', '.join(more)}")
        return False
    console.print("This is what the handout's mistake does.", style="green")
    if more:
        console.print(
            f"In your code, more tests fail than in ours: {', '.join(more)}. If you made no other "
            "change, your solution is written in another way. Why does the mistake reach them?"
        )
    return True


def show_effect(console: Console, effect: Effect) -> None:
    """Print the tests that fail, then what changes in the run of an engine."""
    failing: dict[str, list[Result]] = {}
    for result in effect.run.failures:
        failing.setdefault(test_of(result), []).append(result)
    tests, cases = {*map(test_of, effect.run.results)}, len(effect.run.results)
    in_cases = f" ({len(effect.run.failures)} of {cases} cases)" if cases > len(tests) else ""
    console.print(f"\n{len(failing)} of {len(tests)} tests fail{in_cases}:", highlight=False)
    for name, [first, *more] in failing.items():
        failure = first.failure
        why = (failure.message or failure.explanation or failure.kind) if failure else ""
        others = f", and {len(more)} more case{'s' * (len(more) > 1)}" if more else ""
        console.print(Text.assemble("  ", (name, "bold red"), (others, "dim")))
        console.print(Text(f"      {why.splitlines()[0] if why else first.outcome}", style="dim"))
    if not effect.right:
        console.print(
            "\nThe whole engine is not written yet, so there are no answers to compare. Run this "
            "again when the other exercises pass: it then shows what the mistake does to answers."
        )
        return
    for stream, right in effect.right.items():
        console.print()
        show_run(console, stream, right, effect.wrong.get(stream, {}))


def show_run(console: Console, stream: str, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Print the answers of a run that differ, and its counters that differ."""
    where = f" {stream}" if stream else ""
    if wrong.get("error"):
        console.print(f"The engine{where} stops: {wrong['error']}", style="red", highlight=False)
        return
    differ = [n for n, tokens in right["answers"].items() if wrong["answers"].get(n) != tokens]
    count = len(right["answers"])
    if not differ:
        console.print(f"The engine{where} gives all {count} answers as before.", highlight=False)
    else:
        said = f"The engine{where} gives {len(differ)} of {count} answers wrong:"
        console.print(said, style="red", highlight=False)
        table = Table("request", "right", "wrong", box=None, padding=(0, 2), header_style="dim")
        for name in sorted(differ):
            one, other = right["answers"][name], wrong["answers"].get(name, [])
            table.add_row(name, marked(one, other, "green"), marked(other, one, "red"))
        console.print(table)
    for name, value in right["counters"].items():
        if wrong["counters"][name] != value:
            console.print(f"  {name}: {value} before, {wrong['counters'][name]} now")


def marked(tokens: list[int], other: list[int], style: str) -> Text:
    """Return tokens with a colour from the first place on where they differ from others."""
    pairs = zip(tokens, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))
    words = [" ".join(map(str, part)) for part in (tokens[:same], tokens[same:])]
    return Text.assemble(words[0], " " if words[0] else "", (words[1], style))
