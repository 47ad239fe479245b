"""What a mistake does: the tests that fail, and right and wrong answers side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..testing.results import Run


@dataclass(frozen=True)
class Effect:
    """What a mistake does: to the tests of its exercise, and to the answers of an engine."""

    run: Run
    right: dict[str, Any]  # the results of `engine_answers.py`, without the mistake
    wrong: dict[str, Any]  # and with it; both empty if the engine is not complete

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the tests that fail, without parameters, in order."""
        nodes = (r.node.rpartition("::")[2].partition("[")[0] for r in self.run.failures)
        return tuple(dict.fromkeys(nodes))

    @property
    def answers(self) -> str:
        """Whether the answers are "right", "wrong", or the engine "stops"."""
        if any(result["error"] for result in self.wrong.values()):
            return "stops"
        same = all(self.wrong[s]["answers"] == r["answers"] for s, r in self.right.items())
        return "right" if same else "wrong"


def show_effect(console: Console, effect: Effect) -> None:
    """Print the tests that fail, then what changes in the run of an engine."""
    results = effect.run.results
    failures = effect.run.failures
    console.print(f"\n{len(failures)} of {len(results)} tests fail:", highlight=False)
    for result in failures:
        failure = result.failure
        why = (failure.message or failure.explanation or failure.kind) if failure else ""
        name = result.node.rpartition("::")[2]
        console.print(Text.assemble("  ", (name, "bold red")))
        console.print(Text(f"      {why.splitlines()[0] if why else result.outcome}", style="dim"))
    if not effect.right:
        console.print("\nThe whole engine is not written yet, so there are no answers to compare.")
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
