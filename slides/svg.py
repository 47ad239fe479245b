"""Small pieces of SVG. Colours are classes: the theme says what they are in light and in dark."""

from __future__ import annotations

from html import escape

# Approximate widths of the letters of the decks' font. They are good enough to decide without a
# browser whether a text fits its box.
WIDTH = 1160  # of a slide, inside its margins
NUMBER = {name: number for number, name in enumerate("ABCDEFGH")}  # as the player numbers requests
NARROW, WIDE = "iljtfr.,:;'|!()[]{} -", "mwMWGOQ@%—"


def text_width(text: str, size: float, mono: bool = False) -> float:
    """Estimate the width of a text in pixels."""
    if mono:
        return 0.602 * size * len(text)
    widths = (0.3 if c in NARROW else 0.82 if c in WIDE else 0.54 for c in text)
    return size * sum(widths)


def text(
    x: float, y: float, words: str, kind: str = "", size: float = 20, anchor: str = "start"
) -> str:
    """Draw a line of text on its baseline."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" font-size="{size:g}" '
        f'text-anchor="{anchor}">{escape(words, quote=False)}</text>'
    )


def rect(
    x: float, y: float, width: float, height: float, kind: str, radius: float = 4, style: str = ""
) -> str:
    """Draw a box."""
    extra = f' style="{style}"' if style else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0, width):.1f}" height="{height:.1f}" '
        f'rx="{radius:g}" class="{kind}"{extra}/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> str:
    """Draw a straight line. A line of class `arrow` or `back` has a head at its end."""
    head = ' marker-end="url(#head)"' if kind.split()[0] in ("arrow", "back") else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"{head}/>'


def path(points: list[tuple[float, float]], kind: str) -> str:
    """Draw a line through points."""
    where = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    head = ' marker-end="url(#head)"' if kind.split()[0] in ("arrow", "back") else ""
    return f'<path d="M{where}" class="{kind}"{head}/>'


def hue(number: int) -> str:
    """Return the colour of a request, the same as in the player."""
    return f"--hue: {round(number * 137.5 + 220) % 360}"


def chip(x: float, y: float, name: str, number: int, size: float = 26) -> str:
    """Draw the letter of a request in its colour, centred at a point."""
    return rect(x - size / 2, y - size / 2, size, size, "chip", 5, hue(number)) + text(
        x, y + 0.28 * size, name, "chip-ink strong", 0.72 * size, "middle"
    )


def picture(width: float, height: float, parts: list[str], label: str) -> str:
    """Return the whole drawing. `label` describes it in words, for screen readers."""
    return (
        f'<svg class="picture" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" style="aspect-ratio: {width:.0f} / {height:.0f}; '
        f'max-width: {width:.0f}px">{"".join(parts)}</svg>'
    )
