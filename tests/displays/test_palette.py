"""The colours of the demos, and what they say of a busy machine."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color
from rich.console import Console

from common.displays import neighbour as module
from common.displays.neighbour import neighbour
from common.displays.palette import COLOURS, NUM_REQUESTS, hue, use_palette
from tests.conftest import ROOT

STYLE_SHEET = ROOT / "common" / "tracing" / "player_page" / "style.css"
RECORDING = STYLE_SHEET.with_name("recording.js")


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2, from 0 to 1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str) -> float:
    """Return the contrast of a colour with black or with white, whichever is less."""
    light = luminance(colour) + 0.05
    return min(light / 0.05, 1.05 / light)


@pytest.mark.parametrize("name", COLOURS)
def test_the_colours_are_those_of_the_player(name: str) -> None:
    """Of its light and its dark variant, each is the one that is easier to read anywhere."""
    in_player = {"lost": "hot"}.get(name, name)
    variants = re.findall(rf"--{in_player}: (#[0-9a-f]{{6}})", STYLE_SHEET.read_text())
    assert COLOURS[name][0] == max(variants, key=contrast)
    assert contrast(COLOURS[name][0]) >= 2.5


def console_of(colors: Any) -> Console:
    return use_palette(Console(file=io.StringIO(), force_terminal=True, color_system=colors))


def test_requests_have_colours_of_their_own() -> None:
    console = console_of("truecolor")
    styles = [console.get_style(f"request{n}").color for n in range(NUM_REQUESTS)]
    colours = [style.get_truecolor().hex for style in styles if style is not None]
    assert len({*colours}) == NUM_REQUESTS and all(contrast(c) >= 2.9 for c in colours)


def test_the_player_gives_a_request_the_same_hue() -> None:
    formula = re.findall(r"--hue: \$\{Math.round\((.*?)\) % 360\}", RECORDING.read_text())[0]
    assert [hue(n) for n in range(3)] == [eval(formula, {"number": n}) % 360 for n in range(3)]


def test_a_terminal_with_16_colours_has_no_blue() -> None:
    console = console_of("standard")
    names = [*COLOURS, *(f"request{n}" for n in range(NUM_REQUESTS))]
    assert console.get_style("bold lost").bold
    for name in names:
        assert console.get_style(name).color not in (Color.parse("blue"), None), name


def test_the_time_of_another_process_is_read() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            used, until = 0, time.monotonic() + 60
            while not used and time.monotonic() < until:
                used = sum(t for (pid, _), t in module._ticks().items() if pid == str(busy.pid))
        finally:
            busy.kill()
    assert used > 0


def test_only_a_busy_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits is none, whatever its name."""
    (tmp_path / "stat").write_text("")
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text("77 (a) b) S 1 1 1 0 -1 0 0 0 0 0 900 20 0 0 20 0 1 0\n")
    monkeypatch.setattr(module, "PROC", tmp_path)
    assert neighbour() is None
    ticks = iter([{("77", "a) b"): 920}, {("77", "a) b"): 1020}])
    monkeypatch.setattr(module, "_ticks", lambda: next(ticks))
    assert str(neighbour()).startswith("a) b (process 77) uses ")
