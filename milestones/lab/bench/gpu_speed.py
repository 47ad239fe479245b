"""The measurements of engines for `gpu-check`: the workloads of the bench, and lanes."""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.displays.demo import machine
from common.displays.workload import Workload, WorkloadResult, run
from common.hf.support import layer_shapes
from common.tracing.player import player_html
from common.tracing.trace import Trace

from ...chain import load, package
from .engines import HUGGING_FACE, run_hugging_face
from .workloads import WORKLOADS, first_requests, workload

RUNNING = (1, 32, 128, 256)
FEW = 4  # requests for an engine that is too slow for all of them: they would take an hour
MEMORY_SHARE = 0.6  # of a GPU's free memory for rows of keys and values; a step needs the rest
Measure = Callable[[Workload], WorkloadResult]
Rows = Iterator[dict[str, Any]]


@contextmanager
def quick_collections() -> Iterator[None]:
    """Collect garbage now. Inside this context, the collector looks at new objects only.

    A full collection takes 0.2 s, in which the GPU may have no work.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def nano(milestone: str, device: str, model: str, requests: int) -> dict[str, Any]:
    """Run the standard benchmark with that many requests, all at once, after a warm-up.

    Kernels that are compiled after the warm-up make the result fail: they count as time.
    """
    config = EngineConfig(model=model, device=device, max_num_seqs=requests)
    loaded = load_model(config)
    whole = workload("nano", model, loaded.vocab_size, device != "cpu")
    work = Workload(
        whole.prompts[:requests], whole.max_tokens[:requests], ignore_eos=True,
        temperature=whole.temperature,
    )  # fmt: skip
    with load(milestone).LLMEngine(config, loaded) as engine:
        run(engine, work.warm_up())
        engine.reset_prefix_cache()
        compiled, busy = count_compiled(), time.thread_time()
        replays = engine.stats().num_graph_replays
        with quick_collections():
            result = run(engine, work)
        busy = time.thread_time() - busy
        replays = engine.stats().num_graph_replays - replays
    return {
        "requests": requests,
        "sampling": work.sampling,
        "tokens_per_second": result.tokens_per_second,
        "seconds": result.seconds,
        "thread_seconds": busy,
        "steps": result.stats["num_steps"],
        "graph_replays": replays,
        "span_us": 1e6 * median(result.forward_seconds),
        "gap_us": 1e6 * median(result.gap_seconds) if result.gap_seconds else None,
        "compiled": len(compiled),
        "passed": not compiled and (device == "cpu" or replays > 0),
    }


def count_compiled() -> list[str]:
    """Return a list that gets the name of each kernel that Triton compiles from now on."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        return names

    def compiling(*_: Any, fn: Any = None, **__: Any) -> bool:
        names.append(getattr(fn, "name", str(fn)))
        return False  # do compile it

    knobs.runtime.jit_cache_hook = compiling
    return names


def lanes(milestone: str, device: str, model: str, page: Path) -> dict[str, Any]:
    """Record a short run of 32 requests, and write it as a page with the lanes of its forwards."""
    config = EngineConfig(model=model, device=device, max_num_seqs=32)
    with load(milestone).LLMEngine(config) as engine:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        prompts = [[5 + i] * (20 + i) for i in range(32)]
        engine.generate(prompts, params, progress=False)  # a warm-up
        trace = Trace(engine)
        trace.data.meta["machine"] = machine()
        with trace:
            engine.generate([p[::-1] for p in prompts], params, progress=False)
        spans = list(getattr(getattr(engine.core.runner, "stream", None), "spans", []))[-20:]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(player_html(trace.data), encoding="utf-8")
    gaps = [1e6 * (after[0] - before[1]) for before, after in pairwise(spans)]
    return {"page": page.name, "gap_us": median(gaps) if gaps else None, "passed": True}


def of_milestone(milestone: str, device: str, model: str, few: Collection[str] = ()) -> Rows:
    """Measure a milestone on each workload, with a new engine on the same model each time.

    few: the workloads of which only the first requests are served.
    """
    loaded = load_model(EngineConfig(model=model, device=device))
    engine_class = load(milestone).LLMEngine
    in_rows = importlib.util.find_spec(f"{package(milestone)}.attention") is None  # not in pages

    def measure(work: Workload) -> WorkloadResult:
        config = EngineConfig(**work.config, device=device)
        if in_rows:
            config = replace(config, max_num_seqs=rows_that_fit(loaded, config.max_num_seqs))
        with engine_class(config, loaded) as engine:
            run(engine, work.warm_up())
            engine.reset_prefix_cache()
            with quick_collections():
                return run(engine, work)

    return rows_of(measure, loaded, device, few)


def rows_that_fit(loaded: LoadedModel, wanted: int) -> int:
    """Return how many requests may run at once if each has the memory of the longest request."""
    model = loaded.model
    if model.device.type != "cuda":
        return wanted
    tokens = loaded.resolve_max_model_len(EngineConfig(model=loaded.name))
    numbers = sum(x.num_kv_heads * (x.key_dim + x.value_dim) for x in layer_shapes(model))
    free = torch.cuda.mem_get_info(model.device)[0] * MEMORY_SHARE
    return max(1, min(wanted, int(free // (numbers * tokens * model.dtype.itemsize))))


def of_hugging_face(name: str, device: str, model: str) -> Rows:
    """Measure an engine of Hugging Face: `hf-static` or `hf-batch`."""
    loaded = load_model(EngineConfig(model=model, device=device), plain=True)

    def measure(work: Workload) -> WorkloadResult:
        run_hugging_face(HUGGING_FACE[name], loaded, work.warm_up())
        return run_hugging_face(HUGGING_FACE[name], loaded, work)

    return rows_of(measure, loaded, device, few=["nano"], is_peer=True)


def rows_of(
    measure: Measure,
    loaded: LoadedModel,
    device: str,
    few: Collection[str] = (),
    is_peer: bool = False,
    names: Collection[str] = (),
) -> Rows:
    """Measure each workload, and yield its row. One that fails loses nothing but itself.

    is_peer: the engine is not ours. A workload for which it has no memory is skipped. names: of the
    workloads; all if there are none.
    """
    for name in names or WORKLOADS:
        work = workload(name, loaded.name, loaded.vocab_size, device != "cpu")
        if name in few:
            work = first_requests(work, FEW)
        row = {"workload": name, "requests": len(work.prompts), "sampling": work.sampling}
        try:
            speed = measure(work).tokens_per_second
        except torch.OutOfMemoryError as error:
            skipped = "it does not fit into the memory of this GPU"
            yield {**row, "skipped": skipped, "error": repr(error)[:500], "passed": is_peer}
        except Exception as error:
            yield {**row, "error": repr(error)[:500], "passed": False}
        else:
            yield {**row, "tokens_per_second": speed, "passed": True}
