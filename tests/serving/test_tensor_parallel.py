"""Tensor parallelism: several ranks compute the answers of one process.

Most tests have their ranks in threads. `test_tensor_parallel_processes.py` has real processes.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from common import EngineConfig, EngineDeadError, LoadedModel, SamplingParams, load_model
from common.hf import model_loading
from common.hf.support import UnsupportedModelError
from common.hf.tiny import byte_tokenizer, config_class
from common.parallel import group, worker
from common.parallel.calls import Sender
from common.parallel.ranks import RankError, Ranks
from milestones.chain import electives, load
from tests.conftest import build_engine, plain_model, shared_model
from tests.helpers.oracle import assert_one_answer, assert_same_tokens, generate, greedy
from tests.helpers.serving import Serve, read

pytestmark = [pytest.mark.since("m5_overlap"), pytest.mark.before(*electives())]

PROMPTS = [[7], [1, 2], list(range(40, 57)), list(range(200, 160, -1)), [9, 9, 9]]
DIVISIBLE = [
    *((name, 2) for name in ("llama", "qwen2", "qwen3", "granite", "gpt_neox")), ("gpt_neox", 4),
]  # fmt: skip
AT_ONCE = 10.0  # seconds, on a busy machine: much less than the timeout of a collective operation

Divide = Callable[..., LoadedModel]


class ThreadRank:
    """A rank in a thread: it starts at once, and a test can break it.

    It has the methods of `subprocess.Popen` that `RankGroup` uses.
    """

    def __init__(self, theirs: socket.socket, num_threads: int) -> None:
        connection = Connection(os.dup(theirs.fileno()))
        self.thread = threading.Thread(target=worker.serve, args=(connection,), daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed. It ends when its connections close."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the thread, as `Popen.wait` waits for a process."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("a rank in a thread", timeout or 0.0)
        return 0


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Divide]:
    """`divide(model, size)` loads a model on ranks in threads. They end after the test."""
    monkeypatch.setattr(group, "start_process", ThreadRank)
    loaded: list[LoadedModel] = []

    def make(model: str = "tiny-llama", size: int = 2, **config: Any) -> LoadedModel:
        settings = EngineConfig(model=model, device="cpu", tensor_parallel_size=size, **config)
        loaded.append(load_model(settings))
        return loaded[-1]

    yield make
    for model in loaded:
        model.close()


@pytest.mark.parametrize(("architecture", "size"), DIVISIBLE)
def test_ranks_give_one_answer(
    milestone: str, divide: Divide, architecture: str, size: int
) -> None:
    """I1. The sums of the parts round differently: logits agree to 1e-4 of the largest.

    Of four ranks, each has one head. The biases of a sum are added once, and not four times.
    """
    model = f"tiny-{architecture}"
    loaded, prompt = divide(model, size), torch.tensor([PROMPTS[3]])
    with torch.inference_mode():
        expected, got = (
            m.model(prompt, use_cache=False).logits for m in (plain_model(model), loaded)
        )
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
    engine = build_engine(milestone, loaded, max_num_seqs=3)
    for output in engine.generate(PROMPTS, greedy(16)):
        assert_one_answer(model, output, 16)
    engine.close()


def test_experts_are_divided_too(milestone: str, divide: Divide, tmp_path: Path) -> None:
    """Each rank has a part of every expert, and all ranks choose the same experts."""
    from transformers import AutoModelForCausalLM

    config = config_class("qwen3_moe")(
        vocab_size=259, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=4, num_experts_per_tok=2, initializer_range=0.3, eos_token_id=256,
        max_position_embeddings=512, bos_token_id=None, pad_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    whole = load_model(EngineConfig(model=str(tmp_path), device="cpu"), plain=True)
    engine = build_engine(milestone, divide(str(tmp_path)))
    for output in engine.generate(PROMPTS[:3], greedy(12)):
        expected = generate(whole, tuple(output.prompt_token_ids), 12)
        assert_same_tokens(expected, output.outputs[0].token_ids)
    engine.close()


def test_only_rank_0_samples(milestone: str, divide: Divide) -> None:
    """Requests without a seed draw one. The other ranks get the tokens as inputs of later steps."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2)
    engines = [build_engine(milestone, m, seed=3) for m in (divide(), shared_model("tiny-llama"))]
    ours, theirs = (engine.generate(PROMPTS[:3], params) for engine in engines)
    for one, two in zip(ours, theirs, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in two.outputs]


@pytest.mark.parametrize("milestone_below", ["m3_paged", "m4_radix"])
def test_engines_without_overlap(milestone_below: str, divide: Divide) -> None:
    with build_engine(milestone_below, divide()) as engine:
        for output in engine.generate(PROMPTS, greedy(8)):
            assert_one_answer("tiny-llama", output, 8)


def test_a_rank_has_its_part(milestone: str, divide: Divide) -> None:
    """A rank has half of the layers' weights, and half of the keys and values."""
    whole, loaded = plain_model("tiny-llama"), divide()
    layer = "model.layers"
    in_layers = sum(p.nbytes for n, p in whole.model.named_parameters() if n.startswith(layer))
    everything = sum(p.nbytes for p in whole.model.parameters())
    norms = sum(p.nbytes for n, p in whole.model.named_parameters() if "norm" in n and layer in n)
    assert loaded.ranks is not None
    assert loaded.ranks.weight_bytes == [everything - (in_layers - norms) // 2] * 2
    pools = [build_engine(milestone, m, num_pages=8).core.runner.kv_pool for m in (loaded, whole)]  # type: ignore[attr-defined]
    ours, theirs = (sum(x.nbytes for x in (*pool.keys, *pool.values)) for pool in pools)
    assert ours * 2 == theirs


def test_bytes_over_the_wire(
    milestone: str, divide: Divide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer sends the hidden state of each token twice. Each step also sends its inputs."""
    loaded = divide()
    engine = build_engine(milestone, loaded, enable_overlap=False, cuda_graph=False)
    engine.generate(PROMPTS[:4], greedy(2))
    sums: list[int] = []
    add_parts = Ranks.add_parts

    def counted(self: Ranks, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            sums.append(x.nbytes)
        return add_parts(self, x)

    monkeypatch.setattr(Ranks, "add_parts", counted)
    for prompt in PROMPTS[:4]:
        engine.add_request([*prompt, 3], greedy(4, ignore_eos=True))
    engine.step()  # the prompts
    sums.clear()
    engine.step()
    config: Any = loaded.model.config
    assert sums == [4 * config.hidden_size * 4] * (2 * config.num_hidden_layers)
    engine.close()


def test_ranks_share_main_memory(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of all ranks together take the part of free memory that one pool would take."""
    kv_pool = load(milestone, "kv_pool")
    monkeypatch.setattr(kv_pool, "free_memory", lambda device: 1000 * 64)
    pages = [
        kv_pool.affordable_pages(
            EngineConfig(max_model_len=512, max_num_seqs=256, tensor_parallel_size=size),
            page_bytes=64,
            device=torch.device(device),
        )
        for size, device in ((1, "cpu"), (2, "cpu"), (2, "cuda"))
    ]
    assert pages == [1000, 500, 1000]  # each GPU has memory of its own


@pytest.mark.parametrize(("device", "count"), [("cuda", 1), ("auto", 1), ("cuda:1", 4)])
def test_each_rank_needs_a_gpu_of_its_own(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked before rank 0 has read the model. Rank r uses GPU r."""
    started: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(model_loading, "RankGroup", started.append)
    config = EngineConfig(
        model="tiny-llama", device=device, tensor_parallel_size=2, cuda_graph=False,
        max_num_batched_tokens=64,
    )  # fmt: skip
    with pytest.raises(ValueError, match=rf"GPUs 0 to 1.*device is '{device}'.*{count} GPUs here"):
        load_model(config)
    assert not started


def test_an_engine_ends_the_ranks_that_it_started(
    milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "start_process", ThreadRank)
    config = EngineConfig(model="tiny-llama", device="cpu", tensor_parallel_size=2)
    with load(milestone).LLMEngine(config) as engine:
        assert len(engine.generate([1, 2, 3], greedy(3))[0].outputs[0].token_ids) == 3
        (rank,) = engine.loaded.ranks.workers.processes
    assert not rank.thread.is_alive()
    with pytest.raises(EngineDeadError, match="the ranks were closed"):
        engine.loaded.model(torch.tensor([[1]]))


REFUSED = {
    "KV heads": (
        "tiny-llama",
        4,
        "must divide num_key_value_heads, which is 2 in tiny-llama, got 4",
    ),
    "no plan": ("tiny-gpt2", 2, "no usable tp_plan"),
    "attention in one piece": (
        "tiny-phi3",
        2,
        "'rowwise_split_input' for model.layers.*.self_attn",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_cannot_be_divided(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before another rank is started."""
    model, size, message = REFUSED[why]
    monkeypatch.delattr(group, "start_process")
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(EngineConfig(model=model, device="cpu", tensor_parallel_size=size))
    assert message in str(refused.value)


@pytest.mark.parametrize("engine", ["m1_single", "m2_continuous", "lora"])
def test_engines_that_cannot_be_divided(engine: str) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 for .*, got 2"):
        load(engine).LLMEngine(EngineConfig(model="tiny-llama", tensor_parallel_size=2))


def test_a_wrong_plan_is_noticed(divide: Divide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all ranks together are compared with those of the whole model."""
    from transformers import LlamaForCausalLM

    heads_only = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    mlp = {"layers.*.mlp.down_proj": "rowwise", "layers.*.mlp.gate_proj": "colwise"}
    plan = {**heads_only, **mlp, "layers.*.mlp.up_proj": "colwise"}
    monkeypatch.setattr(LlamaForCausalLM, "tp_plan", plan)
    with pytest.raises(UnsupportedModelError, match="tp_plan does not divide correctly|are off by"):
        divide()


def let_rank_1_fail(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    """Let rank 1 fail in the next sum at which `fails()` is true."""
    add_parts = Ranks.add_parts

    def add_or_fail(self: Ranks, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 1 and fails():
            raise MemoryError("rank 1 has no memory")
        return add_parts(self, x)

    monkeypatch.setattr(Ranks, "add_parts", add_or_fail)


def test_a_rank_that_fails_ends_the_engine(
    milestone: str, divide: Divide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails between two layers. The engine says so at once, and does not wait for it."""
    loaded = divide()
    engine = build_engine(milestone, loaded)
    engine.generate([1, 2, 3], greedy(2))
    failing = iter([False, False, False, True])
    let_rank_1_fail(monkeypatch, lambda: next(failing, False))
    engine.add_request([5, 6, 7], greedy(8))
    started = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1 failed.*rank 1 has no memory"):
        while True:
            engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request([1], greedy(1))
    engine.close()
    assert time.monotonic() - started < AT_ONCE


@pytest.mark.extra("serve")
def test_a_server_with_a_failed_rank_answers_every_client(
    milestone: str,
    divide: Divide,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The open stream gets an error event, /health is 503, and the server still stops."""
    engine = build_engine(milestone, divide())
    fails = threading.Event()
    let_rank_1_fail(monkeypatch, fails.is_set)
    run = serve(engine)
    assert run.get("/health")[0] == 200
    body = {"prompt": [5, 6, 7], "max_tokens": 480, "ignore_eos": True}
    stream = run.open("/v1/completions", {**body, "stream": True})
    assert b"[DONE]" not in stream.recv(4096)
    fails.set()
    text = read(stream, b"\r\n0\r\n\r\n")
    assert b'data: {"error"' in text and b"[DONE]" not in text
    assert b"rank 1 failed: MemoryError" in text
    assert b"Traceback" not in text and "add_or_fail" in caplog.text, "it is in the log"
    assert run.get("/health")[0] == 503
    assert run.post("/v1/completions", body)[0] == 503


def test_a_forward_that_fails_on_rank_0_ends_the_engine(
    milestone: str, divide: Divide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait inside this forward. A second one would add its sums to those."""
    loaded = divide()
    engine = build_engine(milestone, loaded)
    layer: Any = loaded.model.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *_, **__: 1 / 0)
    engine.add_request([5, 6, 7], greedy(8))
    with pytest.raises(RankError, match="failed on rank 0: division by zero"):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.close()


def test_a_module_alone_is_refused(divide: Divide) -> None:
    """The other ranks do not know about it. It must not wait for them."""
    model: Any = divide().model
    with pytest.raises(RuntimeError, match="called by itself"), torch.inference_mode():
        model.model(torch.tensor([[1, 2, 3]]), use_cache=False)
    with pytest.raises(ValueError, match="does not accept .*past_key_values"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)


def test_pools_are_freed_on_all_ranks(
    milestone: str, divide: Divide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of rank 0 that is gone takes those of the other ranks with it, in the next call."""
    receivers: list[Any] = []

    class Kept(worker.Receiver):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            receivers.append(self)

    monkeypatch.setattr(worker, "Receiver", Kept)
    loaded = divide()
    for _ in range(3):
        engine = build_engine(milestone, loaded, num_pages=32)
        engine.generate([1, 2, 3], greedy(2))
        engine.close()
        del engine
        gc.collect()
    assert len(receivers[0].pools) <= 2  # the last engine's, and that of its probe


def test_calls_are_the_same_on_both_sides() -> None:
    """A call keeps the types and the shapes of its tensors, and its numbers."""
    from common.parallel.calls import Receiver

    tensors = [torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([[-(2**40)]])]
    kwargs = {"input_ids": tensors[0], "position_ids": tensors[1], "use_cache": False}
    call, content = Sender().pack("sdpa", (), kwargs)
    _, got = Receiver(torch.device("cpu")).unpack(call, content)
    assert got.keys() == kwargs.keys() and got["use_cache"] is False
    for name, tensor in zip(("input_ids", "position_ids"), tensors, strict=True):
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
    with pytest.raises(ValueError, match="only integer tensors"):
        Sender().pack("sdpa", (torch.ones(2),), {})
