"""Record one decode step of sixteen requests as a Chrome trace, with `torch.profiler`.

    python -m milestones.lab.bench.step_trace m5 FILE.json.gz
    python -m milestones.lab.bench.step_trace m5 FILE.json.gz --layers
    python -m milestones.lab.bench.step_trace vllm FILE.json.gz --vllm-python PATH

The methods of a step and the calls of C have spans with their names, beside torch's operations.
All layers of a decode step are one call of C. With `--layers`, each layer is computed by itself,
and the calls inside it have names; the step then takes a little longer.

Five steps are recorded, and the file has the spans of the third. `python -m milestones attribute
FILE` makes a table of it, and Perfetto (ui.perfetto.dev) draws it.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from common import EMBEDDED_MODEL, EngineConfig, SamplingParams, load_model
from common.displays.demo import machine
from common.fast.cpu_kernels import kernels
from common.tracing.decisions import wrap

from ...chain import ROOT, find_engine, load
from ...recording import write_block
from ..instruments.chrome_spans import ChromeTrace, is_complete, read
from .engines import folder_or_id
from .peers.trace_vllm import MAX_TOKENS, STEPS, WARM_UP_STEPS
from .workloads import workload

PAGE, ROWS = ROOT / "milestones/project/README.md", 4
PEER = Path(__file__).parent / "peers/trace_vllm.py"
LANES = {"step": "host", "run_step": "forward"}  # by a span that only this lane has
KEPT = ("ph", "cat", "name", "pid", "tid", "ts", "dur")  # of an event
# What has a span: parts of the engine, each with the methods that it may have.
TIMED = {
    "": ("process",),
    "core": ("launch", "wait"),
    "core.scheduler": ("schedule", "update_from_output"),
    "core.runner": ("run_step", "prepare", "compute", "choose", "forward"),
}

Json = dict[str, Any]


def main() -> None:
    """Record the step of an engine, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", help="a milestone or an elective, such as m5; or vllm")
    parser.add_argument("file", type=Path, help="a name that ends with .json.gz")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
    parser.add_argument("--layers", action="store_true", help="compute each layer by itself")
    parser.add_argument("--vllm-python", type=Path, help="a Python that has vLLM")
    parser.add_argument(
        "--readme", action="store_true", help="write its table into the page of week 6"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.engine != "vllm":
            name = find_engine(args.engine)
            document = record(name, args.model, Path(folder), layers=args.layers)
        elif args.vllm_python is None:
            parser.error("vllm needs --vllm-python PATH")
        else:
            name = "vllm"
            document = record_vllm(args.vllm_python, args.model, Path(folder))
    made = third_step(document)
    made["otherData"] = {"engine": name, "model": args.model, "machine": machine()}
    args.file.write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))
    if args.readme:
        write_block(PAGE, f"step of {name}", lines_of(made))
    sys.stdout.write(f"{args.file}: {len(made['traceEvents'])} events\n")


def lines_of(document: Json) -> list[str]:
    """Return the table of the page: the largest parts of the step in the lane of the forward.

    vLLM has one lane.
    """
    trace = ChromeTrace.of(document)
    step = trace.step()
    whole, about = step.end - step.start, document["otherData"]
    lanes = {trace.names[lane]: parts for lane, parts in trace.parts(step).items()}
    lane = "forward" if "forward" in lanes else "host"
    parts = lanes[lane]
    rest = sum(part.time for part in parts[ROWS:])
    rows = [(f"`{part.name}`", part.time) for part in parts[:ROWS]]
    rows += [(f"{len(parts) - ROWS} more names", rest)]
    rows += [("no name", whole - sum(part.time for part in parts))]
    return [
        f"A decode step of {about['engine']} for sixteen requests, {whole / 1e3:.1f} ms, "
        f"{about['machine']}:",
        "",
        f"| name, in the lane of the {lane} | self ms | share |",
        "|---|---|---|",
        *(f"| {name} | {time / 1e3:.2f} | {time / whole:.1%} |" for name, time in rows),
    ]


def prompts_of(model: str, vocab_size: int) -> list[list[int]]:
    """Return the prompts of the bench's workload `batch`."""
    return workload("batch", model, vocab_size).prompts


def record(engine_name: str, model: str, folder: Path, *, layers: bool) -> Json:
    """Return the trace of decode steps of one of our engines."""
    config = EngineConfig(model=model, device="cpu", max_num_seqs=16)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    with load(engine_name).LLMEngine(config) as engine, ExitStack() as undo:
        for prompt in prompts_of(model, engine.loaded.vocab_size):
            engine.add_request(prompt, params)
        name_parts(engine, undo)
        if layers:
            decoder: Any = next(m for m in engine.loaded.model.modules() if hasattr(m, "layers"))
            undo.callback(decoder.layers[0].register_forward_hook(ignored).remove)
        for _ in range(WARM_UP_STEPS):
            engine.step()
        # The forward of m5 runs on another thread.
        every = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as profiler:
            for _ in range(STEPS):
                with record_function("step"):
                    engine.step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    document: Json = read(folder / "trace.json")
    return document


def ignored(*_: object) -> None:
    """Do nothing: a layer that has a hook is computed by itself."""


def name_parts(engine: Any, undo: ExitStack) -> None:
    """Give spans to the methods of a step, and to the functions of our library of C."""
    for path, names in TIMED.items():
        owner = functools.reduce(getattr, path.split(".") if path else [], engine)
        for name in names:
            if hasattr(owner, name):
                wrap(undo, owner, name, functools.partial(named, name))
    compiled = kernels()
    if compiled is not None:
        library = compiled.library
        for name, function in list(vars(library).items()):
            if callable(function) and name[0] != "_":
                setattr(library, name, named(f"C: {name}", function))
                undo.callback(setattr, library, name, function)


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records a span for each of its calls."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return recorded


def record_vllm(python: Path, model: str, folder: Path) -> Json:
    """Return the trace of decode steps of vLLM, by its own profiler. See `peers/trace_vllm.py`."""
    asked = {"prompts": prompts_of(model, load_model(EngineConfig(model=model)).vocab_size)}
    command = [str(python), str(PEER), str(folder_or_id(model)), str(folder)]
    subprocess.run(command, input=json.dumps(asked), text=True, cwd="/", check=True)
    written = [path for path in folder.rglob("*.json*") if path.is_file()]
    traces = [document for document in map(read, written) if has_steps(document)]
    if not traces:
        raise RuntimeError(f"vLLM has written no trace with steps in {folder}")
    document: Json = traces[0]
    return document


def has_steps(document: Any) -> bool:
    """Whether a trace has the span of a step."""
    try:
        ChromeTrace.of(document).step()
    except (ValueError, KeyError, TypeError):
        return False
    return True


def third_step(document: Json) -> Json:
    """Return a trace with the spans of the third step, and times from its beginning on.

    A span that began before the step keeps its beginning, so its time may be negative.
    """
    trace = ChromeTrace.of(document)
    step = trace.step(STEPS // 2 + 1)
    events: list[Json] = []
    for event in document["traceEvents"]:
        if not is_complete(event) or event["ts"] >= step.end:
            continue
        if event["ts"] + event["dur"] > step.start:
            kept = {key: event[key] for key in KEPT if key in event}
            kept["ts"] = round(event["ts"] - step.start, 3)
            events.append(kept)
    lanes = {(e["pid"], e["tid"]): LANES[e["name"]] for e in events if e["name"] in LANES}
    names = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for (pid, tid), name in lanes.items()
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


if __name__ == "__main__":
    main()
