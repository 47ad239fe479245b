"""Runs requests by the serial or by the overlapped loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from common import EngineConfig, LoadedModel
from common.displays.workload import Workload, WorkloadResult, run
from common.tracing.data import TraceData
from common.tracing.trace import Trace

from .. import LLMEngine
from ..model_runner import ModelRunner

TRACED_REQUESTS = 6
RunnerFactory = Callable[[PreTrainedModel, EngineConfig], ModelRunner]


@dataclass
class Loop:
    """The result of a run, and the trace of a short run of the same engine before it.

    Recording takes time of the host, so the run that is measured is not recorded.
    """

    result: WorkloadResult
    trace: TraceData


def run_loop(
    workload: Workload, overlap: bool, loaded: LoadedModel, make_runner: RunnerFactory | None = None
) -> Loop:
    """Serve the workload on a new engine, with the runner that `make_runner` returns."""
    config = EngineConfig(**{**workload.config, "enable_overlap": overlap})
    with LLMEngine(config, loaded) as engine:
        if make_runner is not None:
            engine.core.runner = make_runner(loaded.model, engine.config)
        few = replace(
            workload,
            prompts=workload.prompts[:TRACED_REQUESTS],
            max_tokens=workload.max_tokens[:TRACED_REQUESTS],
        )
        with Trace(engine) as trace:  # This run also warms the engine up.
            run(engine, few)
        engine.reset_prefix_cache()
        return Loop(run(engine, workload), trace.data)
