"""The CUDA path on a fake device: the order of the calls, and the rules of a capture."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.clock import Clock
from common.hf import model_loading, shared
from common.tracing.forwards import HookedForwards
from milestones.chain import load
from milestones.lab.bench import roofline
from milestones.lab.instruments.fake_cuda import FakeCuda, FakeStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, shared_model
from tests.helpers.oracle import greedy

GPU = torch.device("cuda", 0)
PROMPTS = [[5, 6, 7], [9] * 11, [200, 3]]


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    device = FakeCuda()
    with device.installed():
        yield device


@pytest.fixture
def loaded() -> LoadedModel:
    """A model without the passes: a capture records its operations one by one."""
    return load_model(EngineConfig(model="tiny-qwen3", device="cpu"), plain=True)


def on_gpu(engine: Any, module_of: ModuleOf, sizes: list[int]) -> Any:
    """Give an engine on a CPU the stream and the graphs that it would have on a GPU."""
    graphs = module_of("cuda_graph").DecodeGraphs
    engine.core.runner.stream.close()
    engine.core.runner.stream = module_of("stream").CudaStream(GPU)
    runner = engine.core.runner
    max_pages = runner.inputs.page_table.shape[1]
    runner.graphs = graphs(runner.forward, sizes, max_pages, capture=True)
    return engine


def tokens_of(engine: Any, most: int) -> list[list[int]]:
    params = [greedy(n, ignore_eos=True) for n in (most, most - 2, most)]
    outputs = engine.generate(PROMPTS, params, progress=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.since("m5_overlap")
@pytest.mark.before("multi_step", "speculative", "disaggregated")
def test_a_step_is_enqueued_behind_the_copies_and_waited_for_once(
    cuda: FakeCuda, make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    engine = on_gpu(make_engine(enable_overlap=True), module_of, [])
    engine.add_request([5, 6, 7], greedy(3, ignore_eos=True))
    cuda.calls.clear()
    engine.step()
    step = ["side waits for main", "event side", "event side"]
    # Step 1 and step 2 are in the queue before the host waits for step 1.
    assert [c for c in cuda.names() if c in (*step, "synchronize event")][:7] == [
        *step, *step, "synchronize event",
    ]  # fmt: skip


class OnGpu:
    """A model on a CPU that says that it is on a GPU."""

    device = GPU

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def started_on_gpu(engine: Any, module_of: ModuleOf, **config: Any) -> Any:
    """Give an engine on a CPU a CUDA stream, and let it capture its graphs as at the start."""
    runner = engine.core.runner
    runner.stream.close()
    runner.stream = module_of("stream").CudaStream(GPU)
    runner.model = OnGpu(runner.model)
    runner.graphs = runner._decode_graphs(replace(engine.config, **config))
    return engine


@pytest.mark.since("m5_overlap")
def test_graphs_are_captured_at_the_start(
    cuda: FakeCuda,
    make_engine: EngineFactory,
    module_of: ModuleOf,
    loaded: LoadedModel,
    recwarn: pytest.WarningsRecorder,
) -> None:
    """All sizes share the forward stream, with its workspaces, and one tensor of logits.

    Captured steps read nothing but their static tensors, and no memory of another graph.
    """
    expected = tokens_of(make_engine(loaded), 5)
    engine = make_engine(loaded, attention_backend="triton", max_num_seqs=3, enable_overlap=True)
    graphs = started_on_gpu(engine, module_of).core.runner.graphs
    # A set, because lora has two graphs of each size: with and without adapters.
    captured = sorted({descriptor.num_reqs for descriptor in graphs.steps})
    assert captured == graphs.sizes == [1, 2, 4] and graphs.num_replays == 0
    assert cuda.names().count("new stream") == 1
    memory = {step.logits.untyped_storage().data_ptr() for step in graphs.steps.values()}
    # Triton's interpreter may warn about NumPy.
    assert len(memory) == 1 and not [w for w in recwarn if "triton" not in w.filename]
    cuda.calls.clear()
    assert tokens_of(engine, 5) == expected
    decodes = engine.stats().num_steps - 1
    assert engine.stats().num_graph_replays == decodes == cuda.names().count("replay side")


@pytest.mark.thorough("many captures on the fake device")
@pytest.mark.since("m5_overlap")
def test_a_capture_that_fails_keeps_no_graphs(
    cuda: FakeCuda, make_engine: EngineFactory, module_of: ModuleOf, loaded: LoadedModel
) -> None:
    """Without sizes, no step replays the graphs that were captured before: they are freed."""
    expected = tokens_of(make_engine(loaded), 4)
    engine: Any = make_engine(loaded, attention_backend="triton", max_num_seqs=3)
    forward = engine.core.runner.forward

    def short_of_memory(inputs: Any) -> torch.Tensor:
        if cuda.capture is not None and inputs.input_ids.shape[1] == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(inputs)

    engine.core.runner.forward = short_of_memory
    graphs = started_on_gpu(engine, module_of).core.runner.graphs
    failed = {descriptor.num_reqs for descriptor in graphs.steps}
    assert graphs.sizes == [] and failed == {2}, "no smaller size is tried"
    assert all(step.graph is None for step in graphs.steps.values())
    assert tokens_of(engine, 4) == expected and engine.stats().num_graph_replays == 0


@pytest.mark.thorough("many captures on the fake device")
@pytest.mark.since("m5_overlap")
def test_a_model_that_waits_runs_without_graphs(
    cuda: FakeCuda,
    make_engine: EngineFactory,
    module_of: ModuleOf,
    loaded: LoadedModel,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some kinds of RoPE look at the positions. Such a forward is found before it is captured."""
    rotary: Any = loaded.model.model.rotary_emb
    rotary.rope_type = "dynamic"
    expected = tokens_of(make_engine(loaded), 3)
    engine = on_gpu(make_engine(loaded, attention_backend="triton"), module_of, [4])
    assert tokens_of(engine, 3) == expected
    assert engine.stats().num_graph_replays == 0
    assert "capture" not in cuda.names() and "without CUDA graphs" in caplog.text


@pytest.mark.since("m5_overlap")
def test_no_garbage_is_collected_during_a_capture(cuda: FakeCuda, module_of: ModuleOf) -> None:
    """An engine that was dropped may leave its graphs in a reference cycle."""
    module, thresholds = module_of("cuda_graph"), gc.get_threshold()
    inputs = static_inputs(module_of)
    old: Any = torch.cuda.CUDAGraph()
    old.cycle = old

    def forward(_inputs: Any) -> torch.Tensor:
        if cuda.capture is not None:
            assert [[] for _ in range(100)]  # with the threshold 1, these would start a collection
        return torch.zeros(1, 5)

    graphs = module.DecodeGraphs(forward, [1], 4, capture=True)
    gc.collect()
    alive = weakref.ref(old)
    gc.set_threshold(1)
    try:
        gc.disable()
        del old
        gc.enable()
        with torch.cuda.stream(torch.cuda.Stream()):
            graphs.run(inputs)
    finally:
        gc.set_threshold(*thresholds)
    assert alive() is None and graphs.num_replays == 1
    assert gc.isenabled()


@pytest.mark.since("m5_overlap")
def test_an_engine_on_a_cpu_collects_no_garbage(make_engine: EngineFactory) -> None:
    """A collection takes a tenth of a second, and there is no graph that it could destroy."""
    whole: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            whole.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        make_engine()
    finally:
        gc.callbacks.remove(note)
    assert not whole


def static_inputs(module_of: ModuleOf) -> Any:
    meta = module_of("attention").AttentionMetadata
    one = torch.zeros(1, dtype=torch.int64)
    table = torch.zeros(1, 4, dtype=torch.int32)
    return module_of("model_input").ModelInput(
        one[None], one[None], one,
        meta(one, torch.tensor([0, 1]).int(), one.int(), table, 4, 1, [1], [1]),
        descriptor=module_of("model_input").BatchDescriptor(1),
    )  # fmt: skip


@pytest.mark.since("m5_overlap")
@pytest.mark.before("disaggregated")  # its first step is one of the other side
def test_a_dropped_engine_waits_before_its_memory_is_freed(
    cuda: FakeCuda, module_of: ModuleOf, code_of: ModuleOf
) -> None:
    engine_class, order = module_of("engine").LLMEngine, list[str]()
    with pytest.MonkeyPatch.context() as patch:
        stream = module_of("stream")
        patch.setattr(code_of("model_runner"), "open_stream", lambda *_: stream.CudaStream(GPU))
        engine = engine_class(
            EngineConfig(model="tiny-llama", device="cpu"), shared_model("tiny-llama")
        )
    for number in range(9):  # so many that no elective waits for a result before it plans
        engine.add_request([1, 2, 3 + number], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    assert engine.core.result_queue, "no step is in flight"
    memory = engine.core.runner.kv_pool.keys[0].untyped_storage()
    weakref.finalize(memory, lambda: order.extend([*cuda.names()[-1:], "freed"]))
    del memory
    weakref.finalize(
        engine.core.runner.kv_pool, lambda: order.extend([*cuda.names()[-1:], "freed"])
    )
    cuda.calls.clear()
    del engine
    gc.collect()
    assert order[:2] == ["synchronize side", "freed"], order


@pytest.mark.since("m2_continuous")
def test_a_closed_engine_holds_no_memory(milestone: str) -> None:
    package = load(milestone)  # with its own stream, in each mode of the tests
    engine: Any = package.LLMEngine(EngineConfig(model="tiny-llama", device="cpu"))
    engine.generate([[1, 2, 3]], greedy(3), progress=False)
    alive = [
        weakref.ref(x)
        for x in (*engine.core.runner.kv_pool.keys, *engine.core.runner.kv_pool.values)
    ]
    engine.close()
    engine.close()
    assert [ref() for ref in alive] == [None] * len(alive), "the KV pool of a closed engine"


@pytest.mark.since("m3_paged")
def test_memory_that_torch_keeps_counts_as_free(cuda: FakeCuda, module_of: ModuleOf) -> None:
    """After a first engine, torch keeps its freed blocks. The next engine may use all of them."""
    cuda.free_bytes, cuda.cached_bytes = 2**20, 2**30
    share = module_of("kv_pool").FREE_MEMORY_SHARE
    assert module_of("kv_pool").free_memory(GPU) == int((2**20 + 2**30) * share)


@pytest.mark.since("m5_overlap")
def test_spans_are_exact_after_an_hour(cuda: FakeCuda, module_of: ModuleOf) -> None:
    """From a common zero, a float32 of milliseconds would have steps of 250 us after an hour."""
    stream = module_of("stream").CudaStream(GPU)

    def work() -> None:
        cuda.now += 3e-6

    for _ in range(360):
        cuda.now += 10.0
        stream.launch(work).wait()
    began, ended = stream.spans[-1]
    assert ended - began == pytest.approx(3e-6, abs=1e-7)
    assert began - stream.spans[0][0] == pytest.approx(359 * (10.0 + 3e-6), abs=1e-3)


def test_hooks_measure_lengths_after_an_hour(cuda: FakeCuda) -> None:
    module = torch.nn.Identity()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        forwards = HookedForwards(module, lambda: True, undo, Clock())
        lengths = []
        for _ in range(360):
            cuda.now += 10.0
            forwards._hook()
            cuda.now += 3e-6
            forwards._hook()
            lengths += [end - begin for begin, end in forwards.take()]
    assert lengths[-1] == pytest.approx(3e-6, abs=1e-7)


def test_hooks_measure_the_gpu_of_the_model(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks run outside the model's own call, where the current GPU is `cuda:0`."""
    streams = {GPU: cuda.main, torch.device("cuda:1"): FakeStream(cuda, "second")}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=GPU: streams[device])
    module: Any = torch.nn.Identity()
    module.parameters = lambda: iter([SimpleNamespace(device=torch.device("cuda:1"), is_cuda=True)])
    with ExitStack() as undo:
        forwards = HookedForwards(module, lambda: True, undo, Clock())
        module(torch.zeros(1))
        forwards.take()
    assert cuda.names().count("event second") == 3 and "event main" not in cuda.names()


def test_the_suite_leaves_the_gpu_alone() -> None:
    """On a machine with a GPU, `device="auto"` would meet Triton's interpreter."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and torch.cuda.device_count() == 0


def test_a_forward_runs_on_the_gpu_of_its_model(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches kernels on the current device, which is `cuda:0` unless a program says so."""
    with shared.on_device(torch.device("cuda:1")):
        assert cuda.names() == ["device cuda:1"]
    entered, loaded = list[torch.device](), shared_model("tiny-llama")

    def on_device(device: torch.device) -> Any:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(shared, "on_device", on_device)
    monkeypatch.setattr(model_loading, "on_device", on_device)
    load_model(EngineConfig(model="tiny-llama", device="cpu"))
    assert entered == [torch.device("cpu")], "the passes try out their kernels"
    shared.make_shareable(loaded.model)
    loaded.model(torch.zeros(1, 1, dtype=torch.int64))
    assert entered == [torch.device("cpu")] * 2


def test_the_roofline_waits_once_for_several_calls(cuda: FakeCuda) -> None:
    """With a wait for each call, the time of the wait would count as time of the product."""
    calls = list[int]()
    work: Any = lambda: calls.append(1)  # noqa: E731
    assert roofline._best(work, GPU) >= 0
    assert len(calls) == 10 * cuda.names().count("synchronize device") == 60


@pytest.mark.since("m5_overlap")
def test_uploads_are_sent_in_one_copy(module_of: ModuleOf) -> None:
    """The memory may become full in the middle: then there is one copy for each piece of it."""
    module, copies = module_of("buffers"), list[int]()
    tensors = [
        torch.arange(n, dtype=kind) for n in (3, 0, 7) for kind in (torch.int32, torch.uint8)
    ]
    for size, count in ((1 << 10, 1), (64, 2)):
        buffers = module.StepBuffers(torch.device("cpu"), size)
        buffers.upload(torch.ones(2))
        pack = buffers.pack = module.Pack(torch.device("cpu"))
        sent = [buffers.upload(tensor) for tensor in tensors]
        pack.send()
        copies.append(len(pack.parts))
        assert all(torch.equal(a, b) for a, b in zip(sent, tensors, strict=True))
        memories = {memory.untyped_storage().data_ptr() for memory, _twin in pack.parts}
        assert not memories & {x.untyped_storage().data_ptr() for x in sent if x.numel()}
        assert copies[-1] == count


@pytest.mark.since("m5_overlap")
def test_a_large_upload_starts_no_threads(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would copy more than 32,768 numbers with several threads, which wait for cores."""
    table = torch.arange(256 * 129, dtype=torch.int32).view(256, 129)
    buffers = module_of("buffers").StepBuffers(torch.device("cpu"))

    def copy(*_: Any, **__: Any) -> None:
        raise AssertionError("torch copies on the host")

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    for kind in (torch.int32, torch.bool, torch.float32, torch.int64):
        assert torch.equal(buffers.upload(table.to(kind)), table.to(kind))
    narrow = table[:, :100]  # not contiguous
    assert torch.equal(buffers.upload(narrow), narrow)


@pytest.mark.since("m5_overlap")
def test_a_replay_uploads_only_the_used_columns_of_the_page_table(
    cuda: FakeCuda, make_engine: EngineFactory, module_of: ModuleOf, loaded: LoadedModel
) -> None:
    """With a limit of 128 tokens, contexts of 42 and 9 tokens need 3 columns and 1 column of 8.

    The static table has all columns. A short request after a long one leaves old pages in it.
    """
    prompts, widths = [[7] * 36, [1, 2, 3]], list[int]()
    plain = make_engine(loaded, max_num_seqs=1, max_model_len=128, page_size=16)
    expected = plain.generate(prompts, greedy(6, ignore_eos=True), progress=False)
    engine = make_engine(loaded, attention_backend="triton", max_num_seqs=1, max_model_len=128,
                         page_size=16)  # fmt: skip
    graphs = on_gpu(engine, module_of, [1]).core.runner.graphs
    run = graphs.run

    def watched(inputs: Any) -> torch.Tensor:
        widths.append(inputs.metadata.page_table.shape[1])
        return run(inputs)

    graphs.run = watched
    outputs = engine.generate(prompts, greedy(6, ignore_eos=True), progress=False)
    assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in expected]
    assert set(widths) == {3, 1}
    assert {s.inputs.metadata.page_table.shape[1] for s in graphs.steps.values()} == {8}


@pytest.mark.since("m5_overlap")
def test_buffers_first_used_in_inference_mode_are_usable_outside(module_of: ModuleOf) -> None:
    buffers = module_of("buffers").StepBuffers(torch.device("cpu"), 64)
    numbers = torch.arange(20)
    with torch.inference_mode():
        buffers.upload(numbers)  # the memory is too small, and a larger one replaces it
    assert torch.equal(buffers.upload(numbers), numbers)


@pytest.mark.since("m5_overlap")
def test_a_launch_sends_its_inputs_once(
    milestone: str, module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = build_engine(milestone, enable_overlap=False)
    sends, module = list[int](), module_of("buffers")
    send = module.Pack.send

    def counted(pack: Any) -> None:
        sends.append(len(pack.parts))
        send(pack)

    @contextmanager
    def packed(self: Any) -> Iterator[None]:  # as on a GPU
        self.pack = module.Pack(torch.device("cpu"))
        yield
        self.pack.send()
        self.pack = None

    monkeypatch.setattr(module.Pack, "send", counted)
    monkeypatch.setattr(module.StepBuffers, "packed", packed)
    outputs = engine.generate(PROMPTS, greedy(6, ignore_eos=True), progress=False)
    monkeypatch.undo()
    expected = build_engine("m4_radix").generate(PROMPTS, greedy(6, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert sends == [1] * engine.stats().num_steps
    engine.close()


@pytest.mark.parametrize(
    ("gib", "tokens"), [(4, 2048), (15, 3840), (24, 6144), (80, 16_384), (141, 16_384)]
)
def test_the_default_budget_fits_the_gpu(
    gib: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard benchmark has 75 steps of prefill with 2,048 tokens each, and 9 with 16,384."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = {0: gib << 30, 1: 16 << 30}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda number: SimpleNamespace(total_memory=properties[number]),
    )  # fmt: skip
    assert EngineConfig().max_num_batched_tokens == tokens
    assert EngineConfig(device="cuda:1").max_num_batched_tokens == 4096
    assert EngineConfig(device="cpu").max_num_batched_tokens == 2048
    assert EngineConfig(max_num_batched_tokens=7).max_num_batched_tokens == 7
