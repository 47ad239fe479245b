"""Build each deck from Markdown as one HTML file, check it in a browser, and print it as a PDF.

A build fails and names the slide if a symbol or a recorded number no longer exists, if the data of
a figure is stale, if a link is dead, if text or code does not fit its slide, or if the browser's
console reports an error.

A build also writes the recorded runs of `facts.RUN_PAGES` as pages of the player.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from common.tracing.player import page_of

from .browser import MISSING, Browser, find, install
from .deck import Deck, Reader
from .facts import RUN_PAGES, data
from .page import HERE, page
from .sources import BuildError

DECKS = HERE / "decks"
OUTPUT = HERE / "dist"


def main(args: argparse.Namespace) -> int:
    """Build the decks that the arguments name and return the exit status."""
    try:
        built = build(args.decks)
        if args.command == "shots":
            return shots(built, args.theme)
        return 0 if args.html_only else publish(built)
    except BuildError as error:
        say(str(error))
        return 1


def chosen(names: Iterable[str]) -> list[Path]:
    """Return the decks of these names, short (m2) or full. Without names, return all decks."""
    wanted, decks = set(names), sorted(DECKS.glob("*.md"))
    known = {name: path for path in decks for name in (path.stem, path.stem.split("_")[0])}
    if unknown := sorted(wanted - known.keys()):
        there = ", ".join(path.stem for path in decks)
        raise BuildError(f"no such deck: {', '.join(unknown)}; there are {there}")
    return [path for path in decks if not wanted or path in {known[name] for name in wanted}]


def build(names: Iterable[str] = ()) -> dict[Path, Deck]:
    """Write the HTML files. Return each file with its deck."""
    paths = chosen(names)
    OUTPUT.mkdir(exist_ok=True)
    built = {}
    for path in paths:
        deck = Reader(path).deck()
        target = OUTPUT / f"{deck.name}.html"
        target.write_text(page(deck), encoding="utf-8")
        built[target] = deck
        say(
            f"{target.name}: {len(deck.slides)} slides, "
            f"{deck.minutes:g} minutes, {deck.code_lines} lines of code"
        )
    write_runs()
    return built


def write_runs() -> None:
    """Write the recorded runs as pages. The handouts link to their steps (`#step=4`)."""
    for name in RUN_PAGES:
        text = page_of(data(f"run_{name}")["trace"])
        (OUTPUT / f"run_{name}.html").write_text(text, encoding="utf-8")
    say(f"{len(RUN_PAGES)} recorded runs for the player, to which the handouts link")


def publish(built: dict[Path, Deck]) -> int:
    """Check every slide in both themes, print the PDFs, and return the exit status."""
    program = find() or install()
    if program is None:
        say(f"the slides are not checked, and no PDF is written: {MISSING}")
        return 1
    wrong = []
    with Browser(program) as browser:
        for path, deck in built.items():
            wrong += [f"{path.name}: {problem}" for problem in problems(browser, path)]
            print_pdf(browser, path, deck)
            print_pdf(browser, path, deck, answers=False)
    for problem in wrong:
        say(problem)
    say(f"{len(wrong)} problems" if wrong else f"all slides fit; HTML and PDF are in {OUTPUT}")
    return 1 if wrong else 0


def problems(browser: Browser, path: Path) -> list[str]:
    """Return the problems that the browser finds in a deck, in the light and the dark theme."""
    script = (HERE / "check.js").read_text(encoding="utf-8")
    found: list[str] = []
    for theme in ("light", "dark"):
        browser.open(f"{path.as_uri()}?theme={theme}")
        seen = browser.evaluate(script)["problems"]
        found += [problem for problem in seen if problem not in found]
        found += [f"console ({theme}): {error}" for error in browser.errors]
    return found


def open_pages(browser: Browser, path: Path, answers: bool) -> None:
    """Open a deck as the pages of a PDF, and wait until all of them are there."""
    browser.open(f"{path.as_uri()}?print-pdf&theme=light&answers={'yes' if answers else 'no'}")
    browser.evaluate(
        "new Promise(done => { const look = () => document.querySelectorAll('.pdf-page').length"
        " >= Reveal.getTotalSlides() ? setTimeout(() => done(1), 200) : setTimeout(look, 50);"
        " look(); })"
    )


def print_pdf(browser: Browser, path: Path, deck: Deck, answers: bool = True) -> Path:
    """Print a deck as a PDF. Raises `BuildError` if it does not have one page per slide.

    answers: without them it is for students, and its name ends in `-questions`.
    """
    open_pages(browser, path, answers)
    target = path.with_name(path.stem + ("" if answers else "-questions") + ".pdf")
    browser.pdf(target)
    pages = len(re.findall(rb"/Type\s*/Page\b", target.read_bytes()))
    if pages != len(deck.slides):
        raise BuildError(f"{target.name} has {pages} pages for {len(deck.slides)} slides")
    return target


def shots(built: dict[Path, Deck], theme: str) -> int:
    """Save a picture of every slide, with all fragments shown, in `dist/shots/`."""
    program = find()
    if program is None:
        raise BuildError(MISSING)
    folder = OUTPUT / "shots"
    folder.mkdir(exist_ok=True)
    with Browser(program) as browser:
        for path, deck in built.items():
            browser.open(f"{path.as_uri()}?theme={theme}")
            browser.evaluate("Reveal.configure({ autoAnimate: false, fragments: false })")
            for number in range(len(deck.slides)):
                browser.evaluate(f"Reveal.slide({number})")
                browser.picture(folder / f"{deck.name}-{number + 1:02}-{theme}.png")
    return 0


def say(message: str) -> None:
    """Print a message for the person at the terminal."""
    sys.stderr.write(f"[slides] {message}\n")
