"""The measurements of kernels for `gpu-check`: decode, prefill, fused ones, those of a replay."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.nn.functional import silu

from common import EngineConfig, SamplingParams
from common.fast.passes import triton_kernels as fused
from common.fast.passes.rotary import signed, turn

from ...chain import load
from ..instruments.paged_case import PagedCase

# Contexts of the requests of a decode: all equal, or mixed as in the standard benchmark.
DECODES: dict[str, list[int]] = {
    "16 of 512": [512] * 16,
    "64 of 2048": [2048] * 64,
    "256 of 1024": [1024] * 256,
    "256 mixed": [100 + (i * 997) % 1500 for i in range(256)],
}
STATIC_TOKENS = 2048  # the static page table is as wide as the longest request
CONTEXT = 800  # tokens, in the middle of the standard benchmark
POOLS = 8  # most copies of keys and values that take turns
UNCACHED = 2**29  # bytes: more than the cache of any GPU holds
HIDDEN, WIDTH, HEADS, DIM = 1024, 3072, (16, 8), 128  # of Qwen3-0.6B
EPSILON = 1e-6


def seconds(work: Callable[[], Any], device: str) -> float:
    """Return the median time of a call. On a GPU, the calls are replays of a graph."""
    if device == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    from triton.testing import do_bench

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return float(do_bench(graph.replay, return_mode="median")) / 1e3


def decode(milestone: str, device: str, dim: int = 128) -> dict[str, Any]:
    """Measure the decode kernels over a static table, by contexts: time, and bytes of KV a second.

    `reduce_us`: the part of the time that combining the splits takes.
    """
    ops = load(milestone, "triton_ops")
    rows = {}
    for name, contexts in DECODES.items():
        case, pools = decode_case(milestone, device, contexts, dim)

        def work(case: PagedCase = case, pools: list[Any] = pools) -> None:
            for keys, values in pools:
                ops.paged_decode(case.query, keys, values, case.meta, 0.25)

        took = seconds(work, device) / len(pools)
        moved = 2 * sum(contexts) * pools[0][0].shape[0] * dim * case.keys.itemsize
        row: dict[str, Any] = {"us": 1e6 * took, "bytes_per_second": moved / took}
        with patch.object(ops.kernels, "reduce_kernel", MagicMock()):
            row["reduce_us"] = row["us"] - 1e6 * seconds(work, device) / len(pools)
        rows[name] = row
    return {"decode": rows, "copy_bytes_per_second": _copy_speed(device), "passed": True}


def decode_case(milestone: str, device: str, contexts: list[int], dim: int) -> tuple[Any, Any]:
    """Return a decode case with a table of the static width, and several copies of its KV."""
    attention = load(milestone, "attention")
    case = PagedCase(
        attention, contexts, [1] * len(contexts), (16, 8), dim, 16,
        torch.float32 if device == "cpu" else torch.float16, device,
    )  # fmt: skip
    width = max(STATIC_TOKENS // 16, case.meta.page_table.shape[1])
    table = torch.zeros(len(contexts), width, dtype=torch.int32, device=device)
    table[:, : case.meta.page_table.shape[1]] = case.meta.page_table
    case.meta.page_table = table
    keys, values = case.keys.nan_to_num(0), case.values.nan_to_num(0)
    copies = 1 if device == "cpu" else num_pools(keys.nbytes + values.nbytes)
    return case, [(keys.clone(), values.clone()) for _ in range(copies)]


def num_pools(size: int) -> int:
    """Return how many pools of `size` bytes take turns, so that no cache of the GPU holds them."""
    return max(1, min(POOLS, UNCACHED // size))


def _copy_speed(device: str) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(2**20 if device == "cpu" else 2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def prefill(milestone: str, device: str, tokens: int = 4096, dim: int = 128) -> dict[str, Any]:
    """Measure the prefill kernel on one prompt: time, and arithmetic per second."""
    ops, case = load(milestone, "triton_ops"), prefill_case(milestone, device, [tokens], dim)

    def work() -> None:
        ops.paged_prefill(case.query, case.keys, case.values, case.meta, 0.25)

    took = seconds(work, device)
    flops = 4 * 16 * dim * tokens * tokens / 2  # two products, and half of the scores are masked
    return {
        "tokens": tokens,
        "us": 1e6 * took,
        "flops_per_second": flops / took,
        "passed": True,
    }


def prefill_case(milestone: str, device: str, lengths: list[int], dim: int) -> PagedCase:
    """Return a step that computes whole prompts, with their keys and values stored."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    attention, ops = load(milestone, "attention"), load(milestone, "triton_ops")
    case = PagedCase(attention, lengths, lengths, (16, 8), dim, 16, dtype, device)
    ops.store_kv(case.keys, case.values, case.key, case.value, case.meta)
    return case


def replay_kernels(milestone: str, device: str, model: str, rows: int = 256) -> dict[str, Any]:
    """Return the 15 kernels that take the most time in a replay of the largest graph.

    All requests have contexts of 800 tokens, spread over the pool.
    """
    config = EngineConfig(model=model, device=device, max_num_seqs=rows)
    with load(milestone).LLMEngine(config) as engine, torch.inference_mode():
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        graphs = engine.core.runner.graphs
        # A CPU has no graphs, but a test takes a step apart there.
        graphs.sizes = graphs.sizes or [rows]
        engine.generate([[5 + i % 90] * 3 for i in range(rows)], params, progress=False)
        step = graphs.steps[max(graphs.steps, key=lambda descriptor: descriptor.num_reqs)]
        table = step.inputs.metadata.page_table
        pages = torch.arange(table.numel(), device=table.device).view(table.shape)
        table.copy_(pages % engine.core.runner.kv_pool.num_pages)
        length = min(CONTEXT, engine.config.max_model_len)
        step.inputs.metadata.seq_lens.fill_(length)
        step.inputs.metadata.seq_lens_cpu = [length] * len(table)
        on_gpu = step.graph is not None
        kind = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kind.CUDA if on_gpu else kind.CPU]) as profile:
            if on_gpu:
                step.graph.replay()
                torch.cuda.synchronize()
            else:
                engine.core.runner.forward(step.inputs)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda e: -float(getattr(e, time_of)))
    return {
        "kernels": [
            {"name": e.key[:100], "calls": e.count, "us": float(getattr(e, time_of))}
            for e in events[:15]
        ],
        "us": sum(float(getattr(e, time_of)) for e in events),
        "passed": on_gpu or device == "cpu",
    }


def row_kernels(device: str, tokens: int = 256) -> dict[str, Any]:
    """Measure what fused kernels save: the same work in one kernel, in more kernels, and in torch.

    tokens: of a decode step, with one of each request.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, device=device).to(dtype)

    x, residual, both = random(HIDDEN), random(HIDDEN), random(2 * WIDTH)
    qkv, angles = random((HEADS[0] + 2 * HEADS[1]) * DIM), random(1, DIM)
    weight, head_weight = (torch.ones(n, device=device, dtype=dtype) for n in (HIDDEN, DIM))
    cos, signed_sin = angles.cos(), signed(angles.sin())
    q, k, _v = qkv.view(1, tokens, -1, DIM).split([*HEADS, HEADS[1]], dim=2)
    gate, up = both.chunk(2, dim=-1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(dtype)

    def norm_and_rotate_apart() -> None:
        normed = [fused.rms_norm(part, head_weight, EPSILON).transpose(1, 2) for part in (q, k)]
        fused.rotate(normed[0], normed[1], cos[:, :, 0], signed_sin[:, :, 0])

    def norm_and_rotate_in_torch() -> None:
        for part in (q, k):
            turn(norm(part, head_weight), cos, signed_sin)

    works: dict[str, dict[str, Callable[[], Any]]] = {
        "sum and norm": {
            "fused": lambda: fused.add_rms_norm(x, residual, weight, EPSILON),
            "apart": lambda: fused.rms_norm(x.add_(residual), weight, EPSILON),
            "torch": lambda: norm(x.add_(residual), weight),
        },
        "norm and rotation of heads": {
            "fused": lambda: fused.norm_and_rotate(
                qkv, HEADS, DIM, cos, signed_sin, (head_weight, head_weight), EPSILON
            ),
            "apart": norm_and_rotate_apart,
            "torch": norm_and_rotate_in_torch,
        },
        "activation and product": {
            "fused": lambda: fused.silu_mul(gate, up),
            "torch": lambda: silu(gate) * up,
        },
    }
    times = {
        name: {kind: 1e6 * seconds(work, device) for kind, work in kinds.items()}
        for name, kinds in works.items()
    }
    return {"tokens": tokens, "us": times, "passed": True}
