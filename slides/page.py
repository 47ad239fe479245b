"""Write a deck as one HTML file that contains reveal.js, its speaker view, fonts and drawings.

reveal.js comes from a pinned Python wheel (`requirements.txt`), so Node is not needed.
"""

from __future__ import annotations

import base64
import hashlib
import html
import subprocess
import sys
import zipfile
from pathlib import Path

from milestones.drawing.theme import player_themes

from .deck import Deck
from .sources import BuildError

HERE = Path(__file__).resolve().parent
PINNED = HERE / "requirements.txt"
CACHE = HERE / ".cache" / hashlib.sha256(PINNED.read_bytes()).hexdigest()[:12]
FONTS = {("400", "normal"): "regular", ("600", "normal"): "semibold", ("400", "italic"): "italic"}

# Colours that the player does not name: ink on coloured ground, and darker inks of light colours.
INKS = {
    "light": "--on: #111417; --prompt-ink: #8a5f00; --output-ink: #0f6d84; --work-ink: #3b6470; "
    "--string: #2f6f3d;",
    "dark": "--on: #0f1215; --prompt-ink: #e0b04a; --output-ink: #4cc0d8; --work-ink: #8fbdc9; "
    "--string: #8fd19c;",
}
PATTERNS = (HERE / "patterns.svg").read_text(encoding="utf-8")


def reveal(name: str) -> bytes:
    """Return a file of reveal.js from the wheel. The first call downloads the wheel."""
    if not list(CACHE.glob("*.whl")):
        sys.stderr.write("[slides] downloading reveal.js (2 MB, once)\n")
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--require-hashes", "--only-binary", ":all:", "--dest", str(CACHE),
            "-r", str(PINNED),
        ]  # fmt: skip
        if subprocess.run(command).returncode != 0:
            raise BuildError("reveal.js could not be downloaded; the message of pip is above")
    with zipfile.ZipFile(next(CACHE.glob("*.whl"))) as wheel:
        return wheel.read(f"sphinx_revealjs/_static/revealjs/{name}")


def style() -> str:
    """Return the style sheet: fonts, colours, layout of reveal.js and style of the decks."""
    colours = {theme: f"{names} {INKS[theme]}" for theme, names in player_themes().items()}
    dark = f":root {{ color-scheme: dark; {colours['dark']} }}"
    chosen = dark.replace(":root", ":root[data-theme=dark]")
    system = dark.replace(":root", ":root:not([data-theme=light])")
    faces = []
    for (weight, slant), name in FONTS.items():
        font = reveal(f"dist/theme/fonts/source-sans-pro/source-sans-pro-{name}.woff")
        faces.append(
            f'@font-face {{ font-family: "Source Sans Pro"; font-weight: {weight}; font-style: '
            f"{slant}; src: url(data:font/woff;base64,{base64.b64encode(font).decode()}) }}"
        )
    return "\n".join(
        [
            reveal("dist/reset.css").decode(),
            reveal("dist/reveal.css").decode(),
            *faces,
            f":root {{ {colours['light']} color-scheme: light; }}",
            f"@media screen and (prefers-color-scheme: dark) {{ {system} }}",
            f"@media screen {{ {chosen} }}",
            (HERE / "theme.css").read_text(encoding="utf-8"),
        ]
    )


def page(deck: Deck) -> str:
    """Return the whole HTML file."""
    scripts = [
        reveal("dist/reveal.js").decode(),
        reveal("plugin/notes/notes.js").decode(),
        (HERE / "deck.js").read_text(encoding="utf-8"),
    ]
    if any("</script" in script for script in scripts):
        scripts = [script.replace("</script", "<\\/script") for script in scripts]
    sections = "\n".join(_section(deck, number) for number in range(len(deck.slides)))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(deck.title)} · LLM Ladder</title><style>{style()}</style></head>"
        f'<body>{PATTERNS}<div class="reveal"><div class="slides">{sections}</div></div>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def _section(deck: Deck, number: int) -> str:
    slide = deck.slides[number]
    before = sum(earlier.minutes for earlier in deck.slides[:number])
    clock = f"<p><strong>{slide.minutes:g} min</strong>, from minute {before:g}</p>"
    morph = " data-auto-animate" if "morph" in slide.classes else ""
    middle = " middle" if "middle" in slide.classes else ""
    return (
        f'<section{morph}><div class="slide {" ".join(slide.classes)}">'
        f"<header><h2>{slide.title}</h2></header>"
        f'<div class="body{middle}">{slide.body}</div>'
        f'<div class="where">LLM Ladder · {html.escape(deck.title)}</div></div>'
        f'<aside class="notes">{clock}{slide.notes}</aside></section>'
    )
