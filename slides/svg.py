"""What the figures of the slides share. Colours are classes: the theme says what they are in light
and in dark. It also says the usual size of letters, and which lines end in an arrow."""

from __future__ import annotations

from common.displays import palette
from milestones.drawing import svg

# Approximate widths of the letters of the decks' font. They are good enough to decide without a
# browser whether a text fits its box.
WIDTH = 1160  # of a slide, inside its margins
SMALL = 20.0  # no text of a slide is smaller
NUMBER = {name: number for number, name in enumerate("ABCDEFGH")}  # as the player numbers requests
NARROW, WIDE = "iljtfr.,:;'|!()[]{} -", "mwMWGOQ@%—"


def text_width(text: str, size: float, mono: bool = False) -> float:
    """Estimate the width of a text in pixels."""
    if mono:
        return 0.602 * size * len(text)
    widths = (0.3 if c in NARROW else 0.82 if c in WIDE else 0.54 for c in text)
    return size * sum(widths)


def rect(
    x: float, y: float, width: float, height: float, kind: str, radius: float = 4, style: str = ""
) -> str:
    """Draw a box."""
    return svg.rect(x, y, width, height, kind, rx=radius, style=style)


def labelled(
    x: float, y: float, width: float, height: float, words: str, kind: str, ink: str = "",
    size: float = 20, radius: float = 4, style: str = "",
) -> list[str]:  # fmt: skip
    """Draw a box with a word in its middle. Its letters are smaller if it is too wide."""
    fits = max(SMALL, min(size, (width - 8) / max(1, text_width(words, 1))))
    middle = (x + width / 2, y + height / 2 + 0.35 * fits)
    box = rect(x, y, width, height, kind, radius, style)
    return [box, svg.text(*middle, words, ink, fits, "middle")] if words else [box]


def hue(number: int) -> str:
    """Return the colour of a request, the same as in the player."""
    return f"--hue: {palette.hue(number):g}"


def chip(x: float, y: float, name: str, number: int, size: float = 26) -> str:
    """Draw the letter of a request in its colour, centred at a point."""
    return rect(x - size / 2, y - size / 2, size, size, "chip", 5, hue(number)) + svg.text(
        x, y + 0.28 * size, name, "chip-ink strong", 0.72 * size, "middle"
    )


def picture(width: float, height: float, parts: list[str], label: str) -> str:
    """Return the whole drawing. `label` describes it in words, for screen readers."""
    style = f"aspect-ratio: {width:.0f} / {height:.0f}; max-width: {width:.0f}px"
    box = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "role": "img", "aria_label": label}
    return svg.element("svg", "".join(parts), kind="picture", **box, style=style)
