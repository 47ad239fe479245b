"""Make the book: a web site with the course, in which the engines run.

The slides are built first, because the chapters show them. This fails if a recorded run is stale.
The site is in build/site. It needs a web server, but no network:

    python -m milestones extras book        # once: Sphinx; Node.js must be there, too
    make site
    python -m http.server -d build/site     # then open http://localhost:8000

Exit status: 0; 2 something is missing, or a page has a fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..chain import ROOT
from ..drawing import theme
from . import diff_pages, exercise_pages, inserts, museum_pages
from .address import SITE, not_found
from .browser_files import BookError, fetch, write
from .exercise_files import ExerciseFiles
from .links import faults
from .staging import ICON, Staging

EXAMPLE = "python -m milestones site"
REFUSALS = (BookError,)
BUILD = ROOT / "build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones site`."""
    parser.add_argument("--out", type=Path, default=BUILD / "site", help="default: build/site")


def main(args: argparse.Namespace) -> int:
    """Make the site."""
    if importlib.util.find_spec("sphinx") is None:
        raise BookError("the site needs Sphinx: python -m milestones extras book")
    packages = fetch(BUILD / "npm")
    with ThreadPoolExecutor() as pool:
        slides = pool.submit(build_slides)  # another process
        exercises = ExerciseFiles()
        slides.result()
    with tempfile.TemporaryDirectory(prefix="book-") as folder:  # its own for each build
        build(Path(folder), packages, exercises, args.out.resolve())
    sys.stdout.write(f"{args.out}: {sum(1 for _ in args.out.rglob('*.html'))} pages\n")
    return 0


def build(folder: Path, packages: Path, exercises: ExerciseFiles, out: Path) -> None:
    """Make the site. folder: empty, for its sources. packages: of npm. out: replaced."""
    sources = folder / "sources"
    staging = Staging(sources)
    staging.fill()
    exercise_pages.lay_out(staging, exercises)
    diff_pages.lay_out(staging)
    museum_pages.lay_out(staging)
    inserts.fill(staging)
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "auto",
        "-c", str(Path(__file__).parent), "-d", str(folder / "doctrees"),
        "-D", f"html_extra_path={sources / '_extra'}", "-D", f"html_favicon={sources / ICON}",
        str(sources), str(out),
    ]  # fmt: skip
    environment = os.environ | {"SOURCE_DATE_EPOCH": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment)
    if done.returncode:
        raise BookError("a page has a fault: see above")
    (out / ".buildinfo").unlink(missing_ok=True)
    (out / ".nojekyll").touch()
    static = out / "_static"
    css = f"{theme_css()}\n{diff_pages.lesson_css()}"
    (static / "theme.css").write_text(css, encoding="utf-8")
    write(packages, static)
    exercises.write(static / "exercises.zip")
    (out / "404.html").write_text(not_found(SITE), encoding="utf-8")
    for page in out.glob("**/*.html"):
        page.write_text(accessible(page.read_text("utf-8")), encoding="utf-8")
    if found := faults(out):
        raise BookError("\n".join(["links that lead nowhere:", *found]))


def accessible(text: str) -> str:
    """Return a page that a keyboard and a screen reader can use: Sphinx leaves three things out.

    A caption in the sidebar is a heading without a level, the two sidebars have no names, and code
    that scrolls has no focus.
    """
    text = text.replace(
        'class="caption" role="heading"', 'class="caption" role="heading" aria-level="2"'
    )
    text = text.replace('class="sidebar-drawer"', 'class="sidebar-drawer" aria-label="All pages"')
    text = text.replace('class="toc-drawer"', 'class="toc-drawer" aria-label="On this page"')
    return text.replace('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">')


def build_slides() -> None:
    """Let the slides write their decks and runs. This fails if one of them shows other code."""
    command = [sys.executable, "-m", "slides", "build", "--html-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BookError(f"the slides cannot be built:\n{done.stderr}")


def theme_css() -> str:
    """Return the colours of the pictures as variables, for light and dark pages."""
    named = {mode: theme.colours(mode) for mode in ("light", "dark")}
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in colours.items())
        for colours in named.values()
    )
    requests = (name for name in named["light"] if name.startswith("request"))
    rules = [f".live .{name}{{fill:var(--{name})}}" for name in requests]
    system = f"@media(prefers-color-scheme:dark){{body:not([data-theme=light]) .live{{{dark}}}}}"
    return "\n".join(
        [f".live{{{light}}}", f"body[data-theme=dark] .live{{{dark}}}", system, *rules]
    )
