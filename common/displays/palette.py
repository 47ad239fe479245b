"""The colours of a terminal, by what they mean. They are those of the player and of the slides.

A terminal with 16 colours shows its own. Blue is not among them: on black it cannot be read.
"""

from __future__ import annotations

import math

from rich.console import Console
from rich.theme import Theme

NUM_REQUESTS = 26  # colours of requests, one for each letter
# Of the light and the dark variant in the player's style sheet, each is the one that can be read
# better both on black and on white. Next to it is the name for a terminal with 16 colours.
COLOURS = {
    "prompt": ("#d29a1f", "yellow"),
    "output": ("#1c8fa8", "cyan"),
    "cached": ("#3f8f4f", "green"),
    "forward": ("#3f8ccc", "cyan"),
    "plan": ("#7b58b8", "magenta"),
    "work": ("#52808c", "yellow"),
    "lost": ("#b3261e", "red"),
}
OF_REQUESTS = ("cyan", "magenta", "yellow", "green", "bright_red", "bright_cyan", "white")


def use_palette(console: Console) -> Console:
    """Give the console the names of this file and `request0`, `request1`, ..., all in bold too."""
    has_16 = console.color_system in (None, "standard", "windows")
    styles = {name: pair[has_16] for name, pair in COLOURS.items()}
    for number in range(NUM_REQUESTS):
        ansi = OF_REQUESTS[number % len(OF_REQUESTS)]
        styles[f"request{number}"] = ansi if has_16 else chip(number)
    styles |= {f"bold {name}": f"bold {style}" for name, style in styles.items()}
    console.push_theme(Theme(styles))
    return console


def request_style(request_id: str) -> str:
    """Return the style of a demo's request, such as r3."""
    return f"request{int(request_id[1:]) % NUM_REQUESTS}"


def letter(request_id: str) -> str:
    """Return the letter of a demo's request, as in the player: A is r0."""
    return chr(ord("A") + int(request_id[1:]) % NUM_REQUESTS)


def hue(number: int) -> float:
    """Return the hue of a request in degrees. The player's scripts have the same formula."""
    return (number * 137.5 + 220) % 360


def chip(number: int, lightness: float = 0.65, chroma: float = 0.11) -> str:
    """Return the colour of a request. By default, it is between the player's dark and light.

    From OKLCH to sRGB: https://www.w3.org/TR/css-color-4/#color-conversion-code
    """
    angle = math.radians(hue(number))
    a, b = chroma * math.cos(angle), chroma * math.sin(angle)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _encoded(part)):02x}" for part in linear)


def _encoded(linear: float) -> float:
    """Return an sRGB component, from 0 to 1."""
    part = min(1.0, max(0.0, linear))
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055
