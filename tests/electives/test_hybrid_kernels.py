"""hybrid_memory on a GPU: its decode kernel, interpreted, and its graphs on the fake device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from common import EngineConfig
from milestones.chain import load
from milestones.lab.bench.gpu_answers import without_waits
from milestones.lab.instruments.fake_cuda import FakeCuda
from milestones.lab.instruments.fake_memory import FakeMemory
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests.conftest import plain_model
from tests.helpers.oracle import assert_same_tokens, generate, greedy
from tests.helpers.sweep_models import NEW_TOKENS, PROMPTS, subject

pytest.importorskip("triton", reason="Triton is for Linux")
pytestmark = pytest.mark.since("hybrid_memory")

CONTEXTS = [1, 2, 7, 16, 17, 90, 300]
RULES: list[dict[str, Any]] = [
    {"window": 1}, {"window": 7}, {"window": 16}, {"window": 64}, {"window": 10_000}, {},
    {"softcap": 2.0}, {"window": 9, "softcap": 50.0}, {"sinks": 0.0}, {"sinks": 3.0, "window": 16},
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_kernel_attends_as_torch_does(milestone: str, rules: dict[str, Any]) -> None:
    """Behind the window, and after the end of a context, all numbers are NaN."""
    ops, reference = (load(milestone, f"hybrid_{name}") for name in ("kernels", "attention"))
    case = PagedCase(load(milestone, "attention"), CONTEXTS, [1] * len(CONTEXTS), (6, 2))
    sinks = rules.get("sinks")
    case.meta = replace(
        case.meta, window=rules.get("window"), softcap=rules.get("softcap"),
        sinks=None if sinks is None else torch.linspace(-1, sinks, 6),
    )  # fmt: skip
    ops.store_kv(case.keys, case.values, case.key, case.value, case.meta)
    if (window := rules.get("window")) is not None:
        for row, context in enumerate(CONTEXTS):
            hidden = torch.arange(max(0, context - window))
            slots = case.meta.page_table[row, hidden // 4].long() * 4 + hidden % 4
            case.keys.flatten(1, 2)[:, slots] = case.values.flatten(1, 2)[:, slots] = torch.nan
    memory = case.keys, case.values, case.meta, SCALE
    ours, theirs = (module.paged_decode(case.query, *memory) for module in (ops, reference))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_a_model_with_windows_on_the_kernel(milestone: str, model_type: str) -> None:
    tried: Any = subject(model_type, small_windows=True)
    config = EngineConfig(
        model=tried.loaded.name, device="cpu", attention_backend="triton", max_model_len=64,
        page_size=4, num_pages=80,
    )  # fmt: skip
    with load(milestone).LLMEngine(config, tried.loaded) as engine:
        assert engine.core.runner.ops.__name__.endswith("hybrid_kernels")
        params = greedy(NEW_TOKENS, ignore_eos=True)
        outputs = engine.generate([list(p) for p in PROMPTS], params, progress=False)
    for answer, output in zip(tried.answers, outputs, strict=True):
        assert_same_tokens(answer, output.outputs[0].token_ids)


@pytest.mark.thorough("Triton's interpreter is slow, and a graph is captured")
def test_graphs_have_the_page_tables_of_all_groups(milestone: str) -> None:
    """On the fake GPU: replays read only static tensors, and their windows move on."""
    prompts = [[5, 6, 7], list(range(40)), [9] * 30]
    cuda = FakeCuda()
    with cuda.installed(), FakeMemory(cuda).installed() as memory:
        config = EngineConfig(
            model="tiny-gemma3_text", device="cuda", dtype="float32", page_size=4, max_num_seqs=2,
            max_model_len=96, model_passes="none",
        )  # fmt: skip
        with load(milestone).LLMEngine(config) as engine, without_waits(engine.core.runner):
            params = greedy(9, ignore_eos=True)
            outputs = engine.generate(prompts, params, progress=False)
            stats = engine.stats()
        assert stats.num_graph_replays > 8 and memory.faults == []
    plain = plain_model("tiny-gemma3_text")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(generate(plain, tuple(prompt), 9), output.outputs[0].token_ids)
