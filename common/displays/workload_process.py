"""A workload on a milestone, in a process of its own.

Engines that are compared run in separate processes, so that no engine inherits memory, threads or
caches from another one. `python -m common.displays.workload_process m1_single` reads a workload as
JSON from standard input and writes the result as JSON to standard output.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

from ..clock import StepCosts
from ..config import EngineConfig
from ..virtual_time import use_virtual_time
from .workload import Workload, WorkloadResult, run


def run_milestone(milestone: str, workload: Workload) -> WorkloadResult | None:
    """Run a milestone's engine in a new process. Return None if there is no such milestone."""
    if importlib.util.find_spec(milestone) is None:
        return None
    return run_module(workload, "common.displays.workload_process", milestone)


def run_module(workload: Workload, *command: str) -> WorkloadResult:
    """Run `python -m command...`, which must follow the protocol of this module.

    Raises `RuntimeError` with the end of its error output if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command], input=json.dumps(asdict(workload)),
        env={**os.environ, "PYTHONBREAKPOINT": "0"},  # a debugger would read the workload
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    sys.stderr.write(done.stderr)  # warnings: a model without CUDA graphs, for example
    return WorkloadResult(**json.loads(done.stdout))


def serve(milestone: str) -> None:
    """Read a workload, run it, and write the result: the process that `run_milestone` starts."""
    workload = Workload(**json.load(sys.stdin))
    with redirect_stdout(sys.stderr):  # what an engine's code prints is not a part of the result
        engine = importlib.import_module(milestone).LLMEngine(EngineConfig(**workload.config))
        # First forwards, and the first use of memory, are slow. A prefix cache keeps that memory.
        run(engine, workload.warm_up())
        engine.reset_prefix_cache()
        if workload.costs is not None:
            use_virtual_time(engine, StepCosts(**workload.costs))
        # A full collection takes 0.2 s, and it would search the modules of the model for garbage.
        gc.collect()
        gc.freeze()
        result = run(engine, workload)
        gc.unfreeze()  # or libraries report the frozen objects as leaks when the process ends
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    serve(sys.argv[1])
