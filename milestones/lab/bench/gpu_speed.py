"""The measurements of engines for `gpu-check`: the workloads of the bench, sampling, and lanes."""

from __future__ import annotations

import gc
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import EngineConfig, LoadedModel, Request, SamplingParams, load_model
from common.displays.demo import machine
from common.displays.workload import Workload, WorkloadResult, run
from common.hf.support import layer_shapes
from common.hf.tiny import byte_tokenizer
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText
from common.tracing.player import player_html
from common.tracing.trace import Trace

from ...chain import load, package
from .engines import HUGGING_FACE, PipedEngine, run_hugging_face
from .workloads import WORKLOADS, first_requests, workload

RUNNING = (1, 32, 128, 256)
SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 0.6, "top_k": 40},
    "top_p": {"temperature": 0.6, "top_p": 0.95},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
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


def sampling(device: str, rows: int = 256, vocab_size: int = 151_936) -> dict[str, Any]:
    """Measure `sample` with each kind of parameters. On a GPU, a hidden wait raises an error."""
    logits = torch.randn(rows, vocab_size, device=device)
    tokenizer, times = byte_tokenizer(), {}
    for name, given in SAMPLERS.items():
        params = [SamplingParams(seed=i, **given) for i in range(rows)]  # type: ignore[arg-type]
        requests = [
            Request("r", None, [1] * 5, p, seed=i, max_model_len=100,
                    text=OutputText(tokenizer, p), arrival_time=0.0)
            for i, p in enumerate(params)
        ]  # fmt: skip
        metadata = SamplingMetadata.from_requests(requests, device)
        sample(logits, metadata)
        times[name] = 1e6 * _without_waits(partial(sample, logits, metadata), device)
    return {"rows": rows, "vocab_size": vocab_size, "us": times, "passed": True}


def _without_waits(work: Callable[[], Any], device: str, calls: int = 10) -> float:
    """Return the time of a call. It raises an error if the call waits for the GPU."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    try:
        for _ in range(calls if on_gpu else 1):
            work()
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    return (time.perf_counter() - started) / (calls if on_gpu else 1)


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

    return _rows(measure, loaded, device, few)


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

    return _rows(measure, loaded, device, few=["nano"], is_peer=True)


def of_vllm(device: str, model: str) -> Rows:
    """Measure the vLLM of this Python on the same weights, which are written to a folder."""
    loaded = load_model(EngineConfig(model=model, device=device), plain=True)
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        vllm = PipedEngine("vllm", Path(sys.executable), lambda: folder, forgets=True)
        loaded.model.to("cpu")  # type: ignore[arg-type]  # the memory of the GPU is for vLLM
        torch.cuda.empty_cache()
        try:
            yield from _rows(vllm.run, loaded, device, is_peer=True)
        finally:
            vllm.close()


def has_vllm() -> bool:
    """Return whether this Python has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def _rows(
    measure: Measure,
    loaded: LoadedModel,
    device: str,
    few: Collection[str] = (),
    is_peer: bool = False,
) -> Rows:
    """Measure each workload, and yield its row. One that fails loses nothing but itself.

    is_peer: the engine is not ours. A workload for which it has no memory is skipped.
    """
    for name in WORKLOADS:
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
