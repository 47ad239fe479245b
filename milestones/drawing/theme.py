"""The colours of all pictures. They are those of the player's style sheet, for light and dark.

A class of a shape is a name of that style sheet (`prompt`, `output`, `cached`, `forward`, `plan`,
`work`, `hot`), or `request3`: the colour of the fourth request. Letters on a request have the class
`chip-ink`, and `pale` is what is held but not used.
"""

from __future__ import annotations

import re

from common.displays.palette import NUM_REQUESTS, chip
from common.tracing.player import part

from . import svg

MEANINGS = ("prompt", "output", "cached", "forward", "plan", "work", "hot", "chip-ink", "soft")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:var(--ink)}.t{font-size:14px;font-weight:600}"
    ".p{fill:var(--panel)}line{stroke:var(--line)}.rule{stroke:var(--soft)}"
    ".m{stroke:var(--ink);stroke-width:1.5}.pale{fill-opacity:.35}"
) + "".join(f".{name}{{fill:var(--{name})}}" for name in MEANINGS)


def player_themes() -> dict[str, str]:
    """Return the variables of the player's themes, `light` and `dark`, as CSS."""
    found = re.findall(r":root \{(.*?)\}", part("style.css"), re.DOTALL)
    return dict(zip(("light", "dark"), (theme.strip() for theme in found), strict=True))


def colours(theme: str) -> dict[str, str]:
    """Return the colours of a theme by name, and those of the requests."""
    named = dict(re.findall(r"--([\w-]+): ([^;]+);", player_themes()[theme]))
    lightness, chroma = float(named["chip-l"]), float(named["chip-c"])
    return named | {f"request{n}": chip(n, lightness, chroma) for n in range(NUM_REQUESTS)}


def style_sheet(rules: str) -> str:
    """Return CSS with the colour in the place of each `var(--name)`, for light and dark.

    Many programs that draw SVG do not know the variables of CSS.
    """
    coloured = "".join(re.findall(r"[^{}]+\{[^{}]*var\([^{}]*\}", rules))
    light, dark = _filled(rules, "light"), _filled(coloured, "dark")
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _filled(rules: str, theme: str) -> str:
    named = colours(theme)
    return re.sub(r"var\(--([\w-]+)\)", lambda name: named[name[1]], rules)


def document(parts: list[str], width: float, height: float, title: str, rules: str = "") -> str:
    """Return the text of a file: the parts on their background.

    title: describes the picture in words. rules: CSS of this picture alone.
    """
    requests = sorted({*re.findall(r"\brequest\d+", "".join(parts))})
    of_requests = "".join(f".{name}{{fill:var(--{name})}}" for name in requests)
    ground = svg.rect(0, 0, width, height, "p", rx=8)
    style = style_sheet(STYLE + of_requests + rules)
    return svg.document([ground, *parts], width, height, style, title)
