"""m2: the reader edits `Scheduler.schedule`, and the core runs with it."""

from __future__ import annotations

import inspect
import textwrap
import traceback
from typing import Any

from ...chain import load
from ..core_run import Step, make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import frame, legend
from .batches import CELL, LANE, LEFT, OUTPUTS, PROMPT_TOKENS, TOP, lanes

MOST_SHOWN = 36  # steps in the picture
FILE = "your schedule"  # the name of the reader's code in a traceback
RUNNING_FIRST = """\
def schedule(self):
    if rows := self.kv_cache.rows:
        return ScheduleBatch(list(rows), [1] * len(rows))
    admitted = self._admit()
    return ScheduleBatch(admitted, [request.num_tokens for request in admitted])
"""


def source() -> str:
    """Return `Scheduler.schedule` of m2, as the file has it."""
    return textwrap.dedent(inspect.getsource(load("m2_continuous", "scheduler").Scheduler.schedule))


def core_with(code: str, rows: int) -> Any:
    """Return the core of m2 with another `schedule`. Raises what the code raises."""
    core = make_core("m2", max_num_seqs=rows)
    names = dict(vars(load("m2_continuous", "scheduler")))
    exec(compile(code, FILE, "exec"), names)  # the reader's own code, in the reader's own browser
    core.scheduler.schedule = names["schedule"].__get__(core.scheduler)
    return core


def draw(code: str, rows: int) -> Shown:
    """Draw the run up to its end, or up to the first step that fails."""
    run, words = list[Step](), ""
    try:
        core = core_with(code, rows)
        requests = {name: request_of(name, PROMPT_TOKENS, n) for name, n in OUTPUTS.items()}
        for step in steps(core, requests):
            run.append(step)
        words = f"All four requests have ended after {len(run)} steps."
    except Exception as error:
        words = f"Step {len(run) + 1}{place_of(error)}: {type(error).__name__}: {error}"
    parts = legend(LEFT, 18, {"prompt": "prompt", "request0": "output", "wait": "waits"})
    shown = run[:MOST_SHOWN]
    parts += lanes(shown, TOP, dict.fromkeys(OUTPUTS, 0), "your schedule") if shown else []
    width, height = LEFT + CELL * len(shown) + 10, TOP + len(OUTPUTS) * LANE + 8
    return Shown(frame(parts, max(360, width), height, words), words, len(run))


def place_of(error: Exception) -> str:
    """Return the line of the reader's code in which an error began, or ""."""
    lines = [line.lineno for line in traceback.extract_tb(error.__traceback__)
             if line.filename == FILE]  # fmt: skip
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    return f", line {lines[-1]} of your code" if lines else ""


FIGURE = Figure(
    name="schedule",
    title="Your own schedule()",
    question=(
        "This is the method of the engine: it computes prompts first. With the four requests above "
        "and two rows, it takes 14 steps. Let running requests come first, and prompts only when "
        "no request runs. How many steps does it take then?"
    ),
    controls=(
        Control("code", "schedule()", source(), lines=40, columns=100),
        Control("rows", "rows", 2, 1, 4),
    ),
    draw=draw,
    asked={"code": RUNNING_FIRST},
)
