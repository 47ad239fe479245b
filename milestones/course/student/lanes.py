"""Diagnose the timelines of m5 from their lanes: `python -m milestones lanes 3 sync`.

Without arguments, the command shows the lanes of all timelines, and the faults that they may have.
Write your diagnosis down before you ask.

Exit status: 0 the lanes were shown, or the diagnosis is right; 1 it is wrong; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from common.displays.palette import use_palette

from ..delta import ROOT

Json = dict[str, Any]
EXAMPLE = "python -m milestones lanes 3 sync"
FILE = "milestones/m5_overlap/timelines.json"
HOST = {"wait": ("·", "dim"), "launch": ("L", "work"), "process": ("P", "output")}
FORWARD = (("█", "forward"), ("▒", "forward"))
# What a timeline may have, and what the lanes show then.
FAULTS = {
    "none": (
        "no fault",
        "Each forward begins when the one before ends. The host launches and processes during a "
        "forward, and then waits for it.",
    ),
    "serial": (
        "step N+1 is launched after the result of step N",
        "The host waits during the whole forward. It processes and launches only when the forward "
        "has ended, so the device waits for both.",
    ),
    "sync": (
        "the host waits for the device while it launches",
        "A launch lasts until its own forward has ended, and the host never waits anywhere else. "
        "The forwards are not longer than usual: the launch waits for them.",
    ),
    "graph": (
        "decodes have no CUDA graph: kernels are launched one by one",
        "A launch is long, and so is its forward, longer than usual: the device waits for the next "
        "kernel again and again.",
    ),
    "text": (
        "the text of a step takes longer than its forward",
        "The longest spans of the host are results that it processes. Again and again, a forward "
        "ends long before the host launches the next one, and the host hardly ever waits.",
    ),
    "retractions": (
        "requests are retracted, and computed again",
        "Some forwards compute many more tokens than the others, although no request arrives, and "
        "they are longer. Memory is short, so the host sometimes needs a result before a launch.",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones lanes`."""
    parser.add_argument("timeline", nargs="?", type=int, help="the number of a timeline")
    parser.add_argument("fault", nargs="?", help=f"your diagnosis: {', '.join(FAULTS)}")


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Show timelines, or check a diagnosis."""
    console = use_palette(Console())
    if not (root / FILE).is_file():
        console.print(f"this tree has no {FILE}: the timelines are those of m5", style="red")
        return 2
    runs = json.loads((root / FILE).read_text(encoding="utf-8"))["runs"]
    number = args.timeline
    if number is not None and not 1 <= number <= len(runs):
        console.print(f"there is no timeline {number}; there are 1 to {len(runs)}", style="red")
        return 2
    if args.fault is not None:
        return checked(runs[number - 1]["fault"], args.fault, console)
    words = "L plan and launch, P process a result, · wait; █ ▒ forwards in turn"
    console.print(words, style="dim", highlight=False)
    for shown in range(1, len(runs) + 1) if number is None else (number,):
        show(shown, runs, console)
    asked = "a timeline" if number is None else f"timeline {number}"
    console.print(f"\nWhich of these has {asked}?")
    for name, (words, _) in FAULTS.items():
        console.print(f"  {name:12} {words}", highlight=False)
    command = f"python -m milestones lanes {number or 'NUMBER'} NAME"
    console.print("\nWrite your diagnosis down. Then let it be checked:", command, highlight=False)
    return 0


def checked(fault: str, diagnosis: str, console: Console) -> int:
    """Say whether a diagnosis is right, and what the lanes of the right one show."""
    if diagnosis not in FAULTS:
        console.print(f"{diagnosis!r} is none of {', '.join(FAULTS)}", style="red")
        return 2
    if diagnosis == fault:
        console.print(f"Right: {FAULTS[fault][0]}. {FAULTS[fault][1]}", style="green")
        return 0
    said = f"No. With {diagnosis!r}, you would see this: {FAULTS[diagnosis][1]}"
    console.print(said, style="yellow", highlight=False)
    return 1


def show(number: int, runs: list[Json], console: Console) -> None:
    """Print the two lanes of a timeline. All timelines have one scale."""
    longest = max(run["forward"][-1]["end"] for run in runs)
    scale = max(40, console.width - 12) / longest
    run = runs[number - 1]
    end = run["forward"][-1]["end"]
    tokens = " ".join(str(forward["tokens"]) for forward in run["forward"])
    console.print(f"\n[bold]timeline {number}[/]: {end:.0f} ms, tokens {tokens}", highlight=False)
    host = [(s, *HOST[s["name"]]) for s in sorted(run["host"], key=lambda s: s["name"] != "wait")]
    forwards = [(s, *FORWARD[n % 2]) for n, s in enumerate(run["forward"])]
    for name, spans in (("host", host), ("forward", forwards)):
        console.print(Text.assemble(f"{name:9}", *cells(spans, end, scale)))


def cells(
    spans: Iterable[tuple[Json, str, str]], end: float, scale: float
) -> list[tuple[str, str]]:
    """Return the characters of a lane. A short span that is no waiting still gets one."""
    width = round(end * scale)
    found = [(" ", "")] * width
    for span, character, style in spans:
        first = round(max(0.0, span["start"]) * scale)
        last = round(min(end, span["end"]) * scale)
        least = character != "·"
        for cell in range(min(first, width - least), min(width, max(last, first + least))):
            found[cell] = (character, style)
    return found
