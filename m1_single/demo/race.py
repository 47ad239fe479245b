"""The same prompt with the KV cache and without it, side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common import RequestOutput, SamplingParams, TokensPrompt

from .. import LLMEngine

REFRESH_SECONDS = 0.1


@dataclass
class Runner:
    """One side of the race. `seconds` counts only the time of its own steps, by its own clock."""

    name: str
    engine: LLMEngine
    seconds: float = 0.0
    machine_seconds: float = 0.0
    output: RequestOutput | None = None
    tokens_before: int = 0

    def start(self, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Give the prompt to the engine."""
        self.tokens_before = self._tokens()
        self.engine.add_request(prompt, params)

    def step(self, check: bool) -> None:
        """Run one step of the engine."""
        started, machine_started = self.engine.now(), time.perf_counter()
        outputs = self.engine.step()
        self.seconds += self.engine.now() - started
        self.machine_seconds += time.perf_counter() - machine_started
        if check:
            self.engine.check_invariants()
        if outputs:
            self.output = outputs[-1]

    @property
    def computed(self) -> int:
        """Return the number of tokens that were computed."""
        return self._tokens() - self.tokens_before

    @property
    def final(self) -> RequestOutput:
        assert self.output is not None and self.output.finished, "I5: the request has not ended"
        return self.output

    def _tokens(self) -> int:
        stats = self.engine.stats()
        return stats.prefill_tokens + stats.decode_tokens

    def panel(self) -> RenderableType:
        """Return the text so far, with the costs so far below it."""
        text = self.output.outputs[0].text if self.output else ""
        costs = f"{self.computed} tokens computed, {self.seconds:.2f} s virtual"
        return Panel(
            Text(text, overflow="fold"),
            title=self.name, title_align="left", subtitle=costs, subtitle_align="left",
        )  # fmt: skip


def race(runners: list[Runner], prompt: TokensPrompt, params: SamplingParams, console: Console,
         check: bool = False) -> None:  # fmt: skip
    """Let both engines answer, as if each had the machine for itself.

    The engine that has used less time so far runs the next step. So at each moment of the race,
    both have had the same time. A terminal shows both texts as they come.
    """
    for runner in runners:
        runner.start(prompt, params)
    shown = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while left := [r for r in runners if r.engine.has_unfinished_requests()]:
            min(left, key=lambda runner: runner.seconds).step(check)
            if console.is_terminal and time.perf_counter() - shown > REFRESH_SECONDS:
                shown = time.perf_counter()
                live.update(side_by_side(runners), refresh=True)
    console.print(side_by_side(runners))


def side_by_side(runners: list[Runner]) -> Table:
    """Return the panels of both sides in two columns."""
    table = Table.grid(expand=True)
    for _ in runners:
        table.add_column(ratio=1)
    table.add_row(*(runner.panel() for runner in runners))
    return table
