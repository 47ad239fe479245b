"""The checks of `gpu-check` that an answer decides: kernels, engines, passes, graphs, overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from common import EngineConfig, SamplingParams, load_model
from common.fast.passes import apply_passes

from ...chain import load
from ..instruments.paged_case import PagedCase

CASES: list[dict[str, Any]] = [
    {"contexts": [1, 255, 256, 257, 513], "counts": [1] * 5, "heads": (6, 2), "dim": 64},
    {"contexts": [9, 700, 33, 1500], "counts": [1, 1, 33, 400], "heads": (9, 3), "dim": 80},
    {"contexts": [64, 4096, 31], "counts": [1, 1, 31], "heads": (16, 8), "dim": 128},
    {"contexts": [77, 300], "counts": [20, 300], "heads": (7, 1), "dim": 256},
]
PAGE_SIZE, DTYPE = 16, torch.bfloat16
# Each dtype, and each page size: to compile the kernels for all pairs would take minutes.
KINDS = [(dtype, PAGE_SIZE) for dtype in (DTYPE, torch.float16, torch.float32)]
KINDS += [(DTYPE, page_size) for page_size in (1, 256)]
LEAST_SHARE = 0.95  # of the first engine's pages: CUDA's libraries keep some memory
NUM_REQUESTS = 20  # of each run of `check_overlap`
PROMPTS = [[7], [1, 2, 3], list(range(40, 90)), list(range(200, 100, -1))]


def check_kernels(milestone: str, device: str) -> Iterator[dict[str, Any]]:
    """Compare each case, in several dtypes and page sizes, with the torch version in float64."""
    attention = load(milestone, "attention")
    kernels = load(milestone, "triton_ops")
    for shape in CASES:
        for dtype, page_size in KINDS:
            case = PagedCase(attention, **shape, page_size=page_size, dtype=dtype, device=device)
            row = {**shape, "dtype": str(dtype), "page_size": page_size}
            try:
                error = case.error(kernels)
            except Exception as failure:  # the other cases are still checked
                yield {**row, "error": repr(failure), "passed": False}
            else:
                yield {**row, "error": error, "passed": error < case.tolerance}


def check_engine(milestone: str, device: str) -> dict[str, Any]:
    """Compare a milestone's greedy answers on the device with those of Hugging Face, in float32."""
    config = EngineConfig(model="tiny-qwen3", device=device, dtype="float32", max_num_seqs=3)
    plain = load_model(config, plain=True)
    with load(milestone).LLMEngine(config) as engine:
        params = SamplingParams(max_tokens=24, temperature=0)
        outputs = engine.generate(PROMPTS, params, progress=False)
        engine.check_invariants()
    same = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt], device=device)
        expected = plain.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        same += expected[0, len(prompt) :].tolist() == output.outputs[0].token_ids
    return {
        "milestone": milestone,
        "same": same,
        "of": len(PROMPTS),
        "passed": same == len(PROMPTS),
    }


def check_passes(device: str, model: str) -> dict[str, Any]:
    """Say how many modules each pass changed, and how far the logits move.

    It passes if the error is within twice that of the model's own dtype. The error of that dtype is
    measured against float32.
    """
    config = EngineConfig(
        model=model, device=device, dtype="auto" if device != "cpu" else "float32"
    )
    loaded = load_model(config, plain=True)
    tokens = torch.arange(5, 5 + 7 * 64, 7, device=device)[None] % loaded.vocab_size
    with torch.inference_mode():
        plain = loaded.model(tokens, use_cache=False).logits.float()
        exact = load_model(EngineConfig(model=model, device=device, dtype="float32"), plain=True)
        reference = exact.model(tokens, use_cache=False).logits
        changed = apply_passes(loaded.model)
        ours = loaded.model(tokens, use_cache=False).logits.float()
    own, error = (float((x - reference).norm() / reference.norm()) for x in (plain, ours))
    on_gpu = ("merge", "norm", "rotary", "gate", "layer") if device != "cpu" else ("merge",)
    return {
        "dtype": str(loaded.model.dtype),
        "changed": changed,
        "error": error,
        "error_without_passes": own,
        "passed": error < 2 * own + 1e-4 and all(changed[name] > 0 for name in on_gpu),
    }


def check_two_engines(milestone: str, device: str, model: str) -> dict[str, Any]:
    """Check that a second engine gets as many pages as the first, and gives the same answers.

    The requests may be so long that the memory of the GPU limits the pages.
    """
    engine_class = load(milestone).LLMEngine
    loaded = load_model(EngineConfig(model=model, device=device))
    longest = int(loaded.model.config.max_position_embeddings)
    config = EngineConfig(model=model, device=device, max_num_seqs=64, max_model_len=longest)
    pages, answers = list[int](), []
    for _ in range(2):
        with engine_class(config, loaded) as engine:
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            outputs = engine.generate(PROMPTS, params, progress=False)
            pages.append(engine.stats().kv_pages_total)
            answers.append([output.outputs[0].token_ids for output in outputs])
    is_enough = pages[1] >= LEAST_SHARE * pages[0]
    return {"pages": pages, "passed": is_enough and answers[0] == answers[1]}


def check_graphs(milestone: str, device: str, model: str, rows: int) -> dict[str, Any]:
    """Capture all graphs, and check that every decode step is a replay of one of them."""
    engine_class = load(milestone).LLMEngine
    config = EngineConfig(model=model, device=device, max_num_seqs=rows)
    loaded = load_model(config)
    before, started = _allocated(device), time.perf_counter()
    with engine_class(config, loaded) as engine:
        seconds = time.perf_counter() - started
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        engine.generate(PROMPTS, params, progress=False)
        stats, graphs = engine.stats(), engine.core.runner.graphs
        captured = sum(step.graph is not None for step in graphs.steps.values())
    on_gpu = device != "cpu"
    return {
        "captured": captured,
        "of": len(graphs.sizes),
        "seconds": seconds,
        "bytes": _allocated(device) - before,
        "replays": stats.num_graph_replays,
        "steps": stats.num_steps,
        "passed": not on_gpu or (captured > 0 and stats.num_graph_replays >= 6),
    }


def _allocated(device: str) -> int:
    """Return the bytes of a GPU that are in use, with what torch keeps; 0 for a CPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def check_overlap(milestone: str, device: str) -> Iterator[dict[str, Any]]:
    """Run serial and overlapped, with and without CUDA graphs: the answers must be the same.

    A row has the gap between forwards and the time per step. On CUDA, a launch that would wait for
    the device raises an error.
    """
    engine_class = load(milestone).LLMEngine
    prompts = [[5 + i] * (1 + 3 * i) for i in range(NUM_REQUESTS)]
    params = [
        SamplingParams(max_tokens=8 + 5 * (i % 7), temperature=i % 2, seed=i, ignore_eos=True)
        for i in range(NUM_REQUESTS)
    ]
    expected: list[list[int]] | None = None
    for cuda_graph in (False, True):
        for overlap in (False, True):
            config = EngineConfig(
                model="tiny-qwen3", device=device, dtype="float32", max_num_seqs=12,
                enable_overlap=overlap, cuda_graph=cuda_graph, seed=0,
            )  # fmt: skip
            with engine_class(config) as engine, without_waits(engine.core.runner):
                started = time.perf_counter()
                outputs = engine.generate(prompts, params, progress=False)
                seconds = time.perf_counter() - started
                engine.check_invariants()
                spans = list(engine.core.runner.stream.spans)
            answers = [output.outputs[0].token_ids for output in outputs]
            expected = expected or answers
            yield {
                "cuda_graph": cuda_graph,
                "enable_overlap": overlap,
                "passed": answers == expected,
                "gap_us": 1e6 * median(b[0] - a[1] for a, b in pairwise(spans)),
                "step_us": 1e6 * seconds / engine.stats().num_steps,
            }


@contextmanager
def without_waits(runner: Any) -> Iterator[None]:
    """Inside this context, torch raises if the launch of a step would wait for the GPU."""
    launch = runner.launch

    def watched(*args: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    if runner.model.device.type == "cuda":
        runner.launch = watched
    yield
