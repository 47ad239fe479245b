"""Run the core of a milestone with a model in plain Python, in virtual time, and note each step.

    core = make_core("m3", num_pages=12, page_size=4)
    for step in steps(core, {"A": request_of("A", 10, 6)}):
        ...                                     # `step` says what was computed, and when

Time is that of `StepCosts`. A step costs the host's time in three parts, as in
`common/virtual_time.py`: when it is scheduled, when it is launched, and when its result is
processed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common import EngineConfig, Request, SamplingParams
from common.clock import StepCosts

from ..chain import find_engine, load
from ..lab.instruments.plain_runner import PlainResult, PlainRunner

MAX_MODEL_LEN = 256
# The requests of the decks: their names, and the lengths of their prompts in tokens.
PROMPTS = {"A": 10, "B": 5, "C": 12}
MOST_STEPS = 500  # of a run: a scheduler without progress ends here, and not never


class Span(NamedTuple):
    """Work in a lane, in milliseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """What one step did.

    computed: for each request, the positions from `start` to `end` that it computes.
    waiting: the names of the requests that wait during the step.
    tokens: the requests that got a token. time: when, in virtual milliseconds.
    """

    computed: dict[str, tuple[int, int]]
    waiting: list[str]
    tokens: list[str] = field(default_factory=list)
    time: float = 0.0


class TimedResult(PlainResult):
    """The tokens of a step, and the time at which its forward ends."""

    def __init__(self, tokens: Any, runner: TimedRunner, end: float) -> None:
        super().__init__(tokens)
        self.runner, self.end = runner, end

    def rows(self) -> Any:
        return self.wait()

    def wait(self) -> Any:
        """Let the host wait until the forward has ended."""
        if self.runner.now < self.end:
            self.runner.host.append(Span("wait", self.runner.now, self.end))
            self.runner.now = self.end
        return self.tokens


class TimedRunner(PlainRunner):
    """Charges virtual time for each step. `now` is the time of the host, in milliseconds."""

    def __init__(self, num_pages: int, costs: StepCosts) -> None:
        super().__init__(num_pages)
        self.costs = costs
        self.now = self.free_at = 0.0
        self.host, self.forward = list[Span](), list[Span]()

    def host_works(self, name: str, batch: Any, part: float) -> None:
        """Charge a part of the host's time of a step."""
        if batch.requests:
            end = self.now + 1000 * part * self.costs.host_seconds(len(batch.requests))
            self.host.append(Span(name, self.now, end))
            self.now = end

    def run(self, batch: Any, memory: Any = None) -> TimedResult:
        """Start a forward when the one before has ended."""
        tokens = super().run(batch, memory).tokens
        self.host_works("launch", batch, 1 / 2)
        num_tokens = sum(batch.num_scheduled_tokens)
        begin = max(self.now, self.free_at)
        self.free_at = begin + 1000 * self.costs.forward_seconds(num_tokens) * bool(num_tokens)
        if num_tokens:
            self.forward.append(Span(f"{num_tokens}", begin, self.free_at))
        return TimedResult(tokens, self, self.free_at)

    launch = run


def request_of(name: str, prompt: int | list[int], max_tokens: int) -> Request:
    """Return a request. prompt: its token ids, or their number."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(
        name, None, tokens, params,
        seed=0, max_model_len=MAX_MODEL_LEN, text=None, arrival_time=0.0,  # type: ignore[arg-type]
    )  # fmt: skip


def make_core(
    milestone: str, num_pages: int = 64, costs: StepCosts | None = None, **settings: Any
) -> Any:
    """Return the core of a milestone. settings: those of `EngineConfig`, or of the core itself."""
    core = load(find_engine(milestone), "engine").EngineCore
    runner, names = TimedRunner(num_pages, costs or StepCosts()), inspect.signature(core).parameters
    if "config" not in names:
        return core(runner, **settings)
    return core(EngineConfig(max_model_len=MAX_MODEL_LEN, **settings), runner)


def steps(
    core: Any, requests: Mapping[str, Request], arrivals: Mapping[str, int] | None = None
) -> Iterator[Step]:
    """Run a core until all its requests have ended. Yield each step after it was computed.

    arrivals: the number of steps after which a request arrives; 0 if it is not there. A step in
    which no request is there is empty.
    """
    later = {name: requests[name] for name in requests}
    scheduled = _noted(core)
    for number in range(MOST_STEPS):
        for name in [name for name in later if (arrivals or {}).get(name, 0) <= number]:
            core.add_request(later.pop(name))
        if not later and not core.scheduler.waiting and not core.scheduler.running:
            return
        scheduled.clear()
        outputs = core.step()
        core.check_invariants()
        computed = scheduled[0] if scheduled else {}
        tokens = [output.request.request_id for output in outputs if output.new_tokens]
        waiting = [request.request_id for request in core.scheduler.waiting]
        yield Step(computed, waiting, tokens, core.runner.now)
    raise AssertionError(f"I5: requests are still there after {MOST_STEPS} steps")


def _noted(core: Any) -> list[dict[str, tuple[int, int]]]:
    """Return a list to which each batch of a core is added, and charge the host for it."""
    noted = list[dict[str, tuple[int, int]]]()
    schedule, update = core.scheduler.schedule, core.scheduler.update_from_output

    def scheduling() -> Any:
        batch = schedule()
        core.runner.host_works("schedule", batch, 1 / 4)
        positions = dict[str, tuple[int, int]]()
        for request, count in zip(batch.requests, batch.num_scheduled_tokens, strict=True):
            start = request.num_computed_tokens
            positions[request.request_id] = (start, start + count)
        noted.append(positions)
        return batch

    def updating(batch: Any, sampled: Any) -> Any:
        core.runner.host_works("process", batch, 1 / 4)
        return update(batch, sampled)

    core.scheduler.schedule, core.scheduler.update_from_output = scheduling, updating
    return noted
