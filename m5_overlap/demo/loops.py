"""Runs the same requests by the serial and by the overlapped loop, and shows both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

from rich.console import Console
from transformers import PreTrainedModel

from common import EngineConfig, LoadedModel
from common.comparison import Figure, comparison, counter
from common.trace import Trace
from common.trace_record import TraceRecord
from common.workload import Workload, WorkloadResult, percentile, run

from .. import LLMEngine
from ..model_runner import ModelRunner
from .lanes import Lanes

LOOPS = {"serial": False, "overlapped": True}  # EngineConfig.enable_overlap
TRACED_REQUESTS = 6
RunnerFactory = Callable[[PreTrainedModel, EngineConfig], ModelRunner]
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "forward, mean": lambda r: f"{1e3 * mean(r.forward_seconds):.2f} ms",
    "gap between forwards, mean": lambda r: f"{1e3 * mean_gap(r):.2f} ms",
    "ITL p50": lambda r: f"{1e3 * percentile(r.inter_token_seconds, 50):.2f} ms",
}


@dataclass
class Loop:
    """The result of a run, and the record of a short run of the same engine before it.

    Recording takes time of the host, so the run that is measured is not recorded.
    """

    result: WorkloadResult
    record: TraceRecord


def run_loop(
    workload: Workload, overlap: bool, loaded: LoadedModel, make_runner: RunnerFactory | None = None
) -> Loop:
    """Serve the workload on a new engine, with the runner that `make_runner` returns."""
    config = EngineConfig(**{**workload.config, "enable_overlap": overlap})
    with LLMEngine(config, loaded) as engine:
        if make_runner is not None:
            engine.runner = make_runner(loaded.model, engine.config)
        few = replace(
            workload,
            prompts=workload.prompts[:TRACED_REQUESTS],
            max_tokens=workload.max_tokens[:TRACED_REQUESTS],
        )
        with Trace(engine) as trace:  # This run also warms the engine up.
            run(engine, few)
        engine.reset_prefix_cache()
        return Loop(run(engine, workload), trace.record)


def show(loops: dict[str, Loop], kind: str, title: str, console: Console) -> None:
    """Print the lanes of each loop, and a table of what was measured.

    kind: `real` or `emulated`, a part of every title.
    """
    for name, loop in loops.items():
        console.print(Lanes(loop.record, console).panel(f"{name}, {kind}"))
    results = {f"{name}, {kind}": loop.result for name, loop in loops.items()}
    console.print(comparison(title, results, FIGURES))


def mean_gap(result: WorkloadResult) -> float:
    """Return the mean seconds from the end of a forward to the start of the next one."""
    return mean(result.gap_seconds) if result.gap_seconds else 0.0
