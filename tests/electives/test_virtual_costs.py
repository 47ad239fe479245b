"""In virtual time, an elective pays for its own work."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common import EngineConfig, LoRARequest, StructuredOutputsParams
from common.clock import StepCosts
from common.displays.workload import watch_forwards
from common.virtual_time import use_virtual_time
from milestones.chain import load
from milestones.lab.instruments.random_adapter import write_adapter
from milestones.lab.instruments.random_images import prompt_of
from tests.conftest import EngineFactory, shared_model
from tests.exercises.by_hand import make_request, watch
from tests.helpers.oracle import greedy

COSTS = StepCosts()
PROMPT = [5, 6, 7]


def forward_seconds(engine: Any, **more: Any) -> list[float]:
    """Serve one request of five tokens. Return the virtual seconds of its forwards."""
    engine.add_request(PROMPT, greedy(5, ignore_eos=True), **more)
    with ExitStack() as undo:
        spans = watch_forwards(engine, undo)
        while engine.has_unfinished_requests():
            engine.step()
        return [end - start for start, end in spans.take()]


@pytest.mark.since("speculative")
@pytest.mark.parametrize("drafts_with_model", [True, False])
def test_the_host_waits_for_drafts(drafts_with_model: bool) -> None:
    loaded = shared_model("tiny-llama")
    config = EngineConfig(model="tiny-llama", device="cpu")
    drafter = load("speculative", "draft_model").DraftModel(loaded, loaded)
    engine_class = load("speculative").LLMEngine
    with engine_class(config, loaded, drafter if drafts_with_model else None) as engine:
        clock = use_virtual_time(engine)
        engine.drafter.propose(make_request("A", PROMPT), 3)
    forwards = COSTS.forward_seconds(3) + 2 * COSTS.forward_seconds(1)
    assert clock.now() == pytest.approx(forwards if drafts_with_model else 0.00002)
    assert clock.words.endswith("100% of that" if drafts_with_model else "0.02 ms")


@pytest.mark.since("agents")
def test_a_copy_takes_a_tenth_of_computing_its_page(make_engine: EngineFactory) -> None:
    """A tiny page would take no time over the link of priority."""
    engine: Any = make_engine(page_size=4, num_pages=8)
    clock = use_virtual_time(engine)
    runner, transfer = engine.core.runner, load("agents", "hi_radix_cache").Transfer
    runner.copy_pages([transfer(1, 1, True), transfer(1, 1, False)])
    runner.copied.wait()
    assert clock.now() == pytest.approx(2 * 0.1 * 4 * COSTS.forward_token / 1000)


@pytest.mark.since("priority")
@pytest.mark.before("agents")
def test_a_copy_of_a_page_takes_its_bytes_over_the_link(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(page_size=4, num_pages=8)
    clock = use_virtual_time(engine)
    runner, transfer = engine.core.runner, load("priority", "hi_radix_cache").Transfer
    page_bytes = runner.host_pool.pages[0].nbytes
    assert engine.core.costs.page_seconds == pytest.approx(page_bytes / 16e9)
    runner.copy_pages([transfer(1, 1, True), transfer(2, 2, True), transfer(1, 1, False)])
    runner.copied.wait()
    assert clock.now() == pytest.approx(3 * page_bytes / 16e9)


@pytest.mark.since("lora")
def test_adapters_make_a_forward_longer(make_engine: EngineFactory, tmp_path: Path) -> None:
    engine: Any = make_engine()
    adapter = LoRARequest("A", write_adapter(tmp_path / "A", engine.adapters.shapes, 0))
    engine.add_lora(adapter)
    use_virtual_time(engine)
    plain = forward_seconds(engine)
    first, *others = forward_seconds(engine, lora_request=adapter)
    assert others == pytest.approx([seconds + 0.0005 for seconds in plain[1:]])
    weights = engine.adapters.adapters["A"].weights.values()
    num_bytes = sum(part.a.nbytes + part.b.nbytes for part in weights)
    assert first == pytest.approx(plain[0] + 0.0005 + num_bytes / 16e9)


@pytest.mark.since("structured_output")
@pytest.mark.extra("grammar")
def test_grammars_are_compiled_and_masks_are_filled() -> None:
    """A thread compiles for 10 ms, once for both requests. The host fills a mask in 0.05 ms."""
    config = EngineConfig(model="tiny-llama", device="cpu", enable_overlap=False)
    letters = StructuredOutputsParams(regex="[a-z]{9}")
    forwards = COSTS.forward_seconds(3) + 2 * COSTS.forward_seconds(1)
    with load("structured_output").LLMEngine(config, shared_model("tiny-llama")) as engine:
        clock = use_virtual_time(engine)
        charged: list[float] = []
        watch(clock, "charge", charged.append)
        for compiling in (0.01, 0.0):
            before = clock.now()
            engine.generate(PROMPT, greedy(3, structured_outputs=letters), progress=False)
            # A mask is filled beside its forward.
            expected = compiling + 3 * COSTS.host_seconds(1) + forwards
            assert clock.now() - before == pytest.approx(expected)
    assert charged.count(0.00005) == 2 * 3


@pytest.mark.since("vision")
def test_an_image_takes_its_encoder(make_engine: EngineFactory) -> None:
    """The forward waits for it, once: the second request finds its embeddings."""
    engine: Any = make_engine("tiny-qwen2_vl")
    use_virtual_time(engine)
    image, seconds = (1, 3, 4), list[float]()
    for start in (5, 6):  # so that the second prompt finds no prefix
        with ExitStack() as undo:
            spans = watch_forwards(engine, undo)
            engine.generate(prompt_of([start, image, 7]), greedy(1, ignore_eos=True))
            [(begin, end)] = spans.take()
            seconds.append(end - begin)
    plain = COSTS.forward_seconds(14)
    assert seconds == pytest.approx([plain + 0.002 + 12 * 0.0002, plain])
