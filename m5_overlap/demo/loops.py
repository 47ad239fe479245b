"""Runs requests by the serial or by the overlapped loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common import EngineConfig, LoadedModel
from common.clock import StepCosts
from common.displays.workload import Workload, WorkloadResult, run
from common.tracing.data import TraceData
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time

from .. import LLMEngine

LOOPS = {"serial": False, "overlapped": True}  # `EngineConfig.enable_overlap`
WARM_UP_REQUESTS = 6


@dataclass
class Loop:
    """The result of a run. trace: of the run, if it was in virtual time."""

    result: WorkloadResult
    trace: TraceData | None = None


def run_loop(
    workload: Workload, overlap: bool, loaded: LoadedModel, costs: StepCosts | None = None
) -> Loop:
    """Serve the workload on a new engine.

    costs: of the virtual time. None: the machine's time counts, so the engine is warmed up, and
    nothing is recorded: recording takes time of the host.
    """
    config = EngineConfig(**{**workload.config, "enable_overlap": overlap})
    with LLMEngine(config, loaded) as engine:
        if costs is not None:
            use_virtual_time(engine, costs)
            with Trace(engine) as trace:
                return Loop(run(engine, workload), trace.data)
        run(engine, replace(workload, prompts=workload.prompts[:WARM_UP_REQUESTS],
                            max_tokens=workload.max_tokens[:WARM_UP_REQUESTS]))  # fmt: skip
        engine.reset_prefix_cache()
        return Loop(run(engine, workload))
