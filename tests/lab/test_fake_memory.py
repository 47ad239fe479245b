"""Engines on the fake GPU: no wait, no race and no mixed devices, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch

from common import EngineConfig, SamplingParams
from milestones.chain import load
from milestones.lab.bench.gpu_answers import without_waits
from milestones.lab.instruments.fake_cuda import FakeCuda
from milestones.lab.instruments.fake_memory import FakeMemory

PROMPTS = [[5, 6, 7], [9] * 11, [200, 3], [5, 6, 8, 8]]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=4, seed=1, top_k=9, top_p=0.8, ignore_eos=True),
    SamplingParams(max_tokens=7, seed=2, logprobs=2, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(
        max_tokens=5, temperature=0, logit_bias={3: 2.0}, min_tokens=4, prompt_logprobs=2
    ),
]


@pytest.fixture
def memory() -> Iterator[FakeMemory]:
    cuda = FakeCuda()
    with cuda.installed(), FakeMemory(cuda).installed() as memory:
        yield memory


def answers(
    milestone: str, device: str, count: int = len(PROMPTS), **config: Any
) -> list[list[int]]:
    """Serve up to four requests, two of them at a time. With kernels, no launch may wait.

    Attention in torch waits on a GPU: its shapes depend on lengths.
    """
    config = {"model": "tiny-qwen3", "max_num_seqs": 2, "page_size": 4, **config}
    config |= {"device": device, "dtype": "float32"}
    with load(milestone).LLMEngine(EngineConfig(**config)) as engine:
        may_wait = config.get("attention_backend") == "torch" or milestone < "m5"
        with nullcontext() if may_wait else without_waits(engine.core.runner):
            outputs = engine.generate(PROMPTS[:count], PARAMS[:count], progress=False)
        if device == "cuda":
            assert str(engine.core.runner.kv_pool.keys[0].device) == "cuda:0"
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.thorough("seconds on each engine", fast_on=("m5_overlap",))
@pytest.mark.since("m2_continuous")
@pytest.mark.before("disaggregated")  # two streams use different pages of one tensor at a time
@pytest.mark.electives
def test_an_engine_on_the_gpu_has_no_faults(milestone: str, memory: FakeMemory) -> None:
    config: dict[str, Any] = {"model_passes": "none", "attention_backend": "torch"}
    with memory.paused():
        expected = answers(milestone, "cpu", **config)
    assert answers(milestone, "cuda", **config) == expected
    assert memory.faults == []


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.since("m3_paged")
@pytest.mark.before("disaggregated")  # a GPU has two pools of a size that is given
def test_kernels_and_graphs_have_no_faults(milestone: str, memory: FakeMemory) -> None:
    with memory.paused():
        expected = answers(milestone, "cpu", model_passes="none")
    assert answers(milestone, "cuda") == expected
    assert memory.faults == []


def m5(name: str) -> Any:
    """Return a module of m5, where the faults are planted."""
    return load("m5_overlap", name)


def planted(patch: pytest.MonkeyPatch, where: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by `change(function, *args)`."""
    original = getattr(where, name)
    patch.setattr(where, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def after_sampling(look: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """Return a change of `sample` that does something with its token ids."""

    def change(sample: Any, *args: Any) -> Any:
        output = sample(*args)
        look(output.token_ids)
        return output

    return change


# What is done with the sampled tokens while a step is launched, and the words of the fault.
WAITS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda ids: ids[0].item(), "the host waits: item"),
    "tolist": (lambda ids: ids.tolist(), "the host waits: tolist"),
    "cpu": (lambda ids: ids.cpu(), "the host waits: a copy that blocks"),
    "bool": (lambda ids: bool(ids[0] > 0), "the host waits: __bool__"),
    "numpy": (lambda ids: ids.numpy(), "NumPy cannot read"),
    "boolean index": (lambda ids: ids[ids > 3], "the host waits: index"),
    "masked_select": (lambda ids: ids.masked_select(ids > 3), "the host waits: masked_select"),
    "nonzero": (lambda ids: ids.nonzero(), "the host waits: nonzero"),
    "repeat_interleave": (
        lambda ids: ids.repeat_interleave(torch.ones_like(ids)), "waits: repeat_interleave",
    ),
    "a tensor of Python's numbers": (
        lambda ids: torch.tensor([1.0, 2.0], device=ids.device), "copies numbers of Python",
    ),
    "both sides": (lambda ids: ids + torch.ones(len(ids), dtype=torch.int64), "of the host and"),
}  # fmt: skip


def serve_with_fault(memory: FakeMemory, count: int = len(PROMPTS)) -> list[str]:
    """Serve the first requests on m5, and return the faults that were found."""
    with suppress(RuntimeError):  # the engine goes on after a failed forward, but not always
        answers("m5_overlap", "cuda", count, model_passes="none", cuda_graph=False)
    return memory.faults


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_launch_is_found(
    name: str, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, words = WAITS[name]
    planted(monkeypatch, m5("model_runner"), "sample", after_sampling(look))
    assert words in serve_with_fault(memory, count=1)[0]


def no_wait_for_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(m5("stream").CudaEvent, "wait", lambda self: None)


def no_wait_for_the_other_stream(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def enqueuing(self: Any) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            yield

    patch.setattr(m5("stream").CudaStream, "enqueuing", enqueuing)


def a_pageable_copy(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: Any, size: int) -> None:
        with torch.inference_mode(False):
            self.memory = torch.empty(-(-size // 16) * 16, dtype=torch.uint8)
        self.views, self.used = {}, 0

    patch.setattr(m5("buffers").StepBuffers, "_allocate", allocate)


def buffers_without_turns(patch: pytest.MonkeyPatch) -> None:
    """The host fills the memory that a step in flight still reads and writes."""

    def begin(self: Any) -> None:
        self.used = 0

    patch.setattr(m5("buffers").StepBuffers, "begin", begin)
    planted(patch, m5("model_runner").ModelRunner, "launch", one_set_of_buffers)


def one_set_of_buffers(launch: Any, runner: Any, *args: Any) -> Any:
    runner.buffers.rotate()  # `launch` turns it back
    return launch(runner, *args)


FAULTS = {
    no_wait_for_a_step: "host reads memory without waiting",
    no_wait_for_the_other_stream: "memory without waiting",
    a_pageable_copy: "not pinned",
    buffers_without_turns: "host writes memory without waiting",
}


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_race_is_found(
    plant: Any, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert FAULTS[plant] in serve_with_fault(memory)[0]


def test_memory_that_another_stream_reads_must_not_be_freed(memory: FakeMemory) -> None:
    """The allocator gives it to the next tensor of the stream on which it was allocated."""
    side = torch.cuda.Stream()
    for waits in (True, False):
        x = torch.zeros(8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        del x
        if waits:
            torch.zeros(8, device="cuda")
        else:
            with pytest.raises(RuntimeError, match="freed while another stream"):
                torch.zeros(8, device="cuda")
        del y


def test_the_host_may_read_what_it_has_waited_for(memory: FakeMemory) -> None:
    pinned = torch.empty(3, pin_memory=True)
    assert pinned.is_pinned() and not torch.empty(3).is_pinned()
    for event in (torch.cuda.Event(), None):
        pinned.copy_(torch.ones(3, device="cuda"), non_blocking=True)
        if event is not None:
            event.record()
            event.synchronize()
            assert pinned.tolist() == [1, 1, 1]
        else:
            with pytest.raises(RuntimeError, match="host reads memory"):
                pinned.tolist()
    assert len(memory.faults) == 1
