"""The gap between two forwards, with and without grammars, and with and without delayed sampling.

`traced` runs in virtual time. `measure` takes the machine's time. On a CPU, its forwards are
emulated: the forward thread sleeps for `forward_ms`, as if another processor computed, and the
logits are always the same. The work of the host is real, and so are the masks and the sampling,
over the vocabulary of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from transformers import PreTrainedModel

from common import EngineConfig, LoadedModel, SamplingParams, StructuredOutputsParams
from common.clock import StepCosts
from common.tracing.data import TraceData
from common.tracing.forwards import StreamForwards
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time

from .. import LLMEngine
from ..model_input import ModelInput
from ..model_runner import ModelRunner


@dataclass(frozen=True)
class Loop:
    """One way to run the same number of steps with the same number of requests."""

    name: str
    has_grammars: bool
    delays_sampling: bool = True
    overlaps: bool = True


LOOPS = (
    Loop("no grammar", False),
    Loop("grammars, delayed sampling", True),
    Loop("grammars, each step waits", True, delays_sampling=False),
    Loop("grammars, serial loop", True, overlaps=False),
)


class SleepingRunner(ModelRunner):
    """A runner with forwards that compute nothing. The stream sleeps in their place."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, vocab_size: int) -> None:
        self.logits: torch.Tensor | None = None  # the check of the model takes real forwards
        super().__init__(model, config)
        chance = torch.Generator().manual_seed(0)
        self.logits = torch.randn(1, vocab_size, generator=chance)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return logits [N, V]."""
        if self.logits is None:
            return super().forward(inputs)
        return self.logits.repeat(len(inputs.logits_indices), 1)


@dataclass
class Gaps:
    """What the rounds of one loop gave."""

    gap_seconds: list[float] = field(default_factory=list)  # of each pair of forwards
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def median_ms(self) -> float:
        return 1e3 * median(self.gap_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def measure(
    loaded: LoadedModel,
    loops: tuple[Loop, ...],
    *,
    num_requests: int,
    max_tokens: int,
    forward_ms: float,
    num_rounds: int = 3,
) -> dict[str, Gaps]:
    """Run the loops in turn, several rounds, so that a busy moment of the machine meets all."""
    found = {loop.name: Gaps() for loop in loops}
    engines = {loop.name: _open(loaded, loop, num_requests, forward_ms) for loop in loops}
    for number in range(num_rounds + 1):
        for loop in loops:
            gaps = Gaps() if number == 0 else found[loop.name]  # round 0 warms up
            _run(engines[loop.name], loop, num_requests, max_tokens, gaps)
    for engine in engines.values():
        engine.close()
    return found


def traced(
    loaded: LoadedModel, loop: Loop, costs: StepCosts, *, num_requests: int, max_tokens: int
) -> tuple[TraceData, Gaps]:
    """Run one loop in virtual time, with forwards that compute. Return its trace and its gaps."""
    gaps = Gaps()
    with _open(loaded, loop, num_requests) as engine:
        use_virtual_time(engine, costs)
        with Trace(engine) as trace:
            _run(engine, loop, num_requests, max_tokens, gaps)
    return trace.data, gaps


def _open(loaded: LoadedModel, loop: Loop, num_requests: int, forward_ms: float = 0.0) -> LLMEngine:
    on_gpu = loaded.model.device.type == "cuda"
    config = EngineConfig(
        model=loaded.name, device=str(loaded.model.device), max_num_seqs=num_requests,
        max_model_len=128, enable_overlap=loop.overlaps,
        emulated_forward_ms=0.0 if on_gpu else forward_ms,
    )  # fmt: skip
    engine = LLMEngine(config, loaded)
    if config.emulated_forward_ms:
        engine.core.runner = SleepingRunner(loaded.model, engine.config, loaded.vocab_size)
    engine.core.scheduler.delays_sampling = loop.delays_sampling
    return engine


def _run(engine: LLMEngine, loop: Loop, num_requests: int, max_tokens: int, gaps: Gaps) -> None:
    """Decode `max_tokens` tokens of each request. A long regular expression ends no request."""
    letters = StructuredOutputsParams(regex="[a-z ]{2000}")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=not loop.has_grammars,
        structured_outputs=letters if loop.has_grammars else None,
    )  # fmt: skip
    prompts = [[5 + number, 6, 7] for number in range(num_requests)]
    forwards = StreamForwards(engine.core.runner.stream.spans)
    outputs = engine.generate(prompts, params, progress=False)
    spans = forwards.take()
    gaps.gap_seconds += [after[0] - before[1] for before, after in pairwise(spans)]
    gaps.num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    gaps.seconds += spans[-1][1] - spans[0][0]
