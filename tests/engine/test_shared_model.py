"""Several engines share one loaded model, in one thread and in several threads."""

from __future__ import annotations

import copy
import importlib
import threading
from typing import Any

import pytest
import torch

from common import EngineConfig, LLMEngine, LoadedModel, load_model
from common.hf.shared import attention_switched, lock_of, make_shareable
from tests.conftest import MILESTONES, ROOT, build_engine, shared_model
from tests.helpers.oracle import assert_one_answer, drain, greedy

MODEL = "tiny-llama"
PROMPTS = ([11, 12, 13, 14, 15], [7], list(range(40, 60)))


def test_engines_of_all_milestones_step_in_turns_on_one_model() -> None:
    """Each package registers its attention under a name of its own."""
    engines = [build_engine(milestone, MODEL, page_size=4) for milestone in MILESTONES]
    for engine in engines:
        for prompt in PROMPTS:
            engine.add_request(prompt, greedy(12))
    finished: list[list[Any]] = [[] for _ in engines]
    while any(engine.has_unfinished_requests() for engine in engines):
        for outputs, engine in zip(finished, engines, strict=True):
            outputs += [output for output in engine.step() if output.finished]
    for outputs, engine in zip(finished, engines, strict=True):
        engine.close()
        assert len(outputs) == len(PROMPTS)
        for output in outputs:
            assert_one_answer(MODEL, output, 12)


def test_attention_functions_have_names_of_their_own() -> None:
    names = [
        importlib.import_module(f"{name}.attention").NAME
        for name in MILESTONES
        if (ROOT / name / "attention.py").exists()
    ]
    assert len(set(names)) == len(names) == len(MILESTONES[2:]), names


def test_engines_of_several_threads_share_a_model() -> None:
    """m1 and m2 use the model's own attention, while m3, m4 and m5 replace it by their own."""
    engines = [build_engine(m, MODEL, page_size=4) for m in MILESTONES for _ in range(2)]
    outputs: list[Any] = []

    def serve(engine: LLMEngine) -> None:
        for prompt in PROMPTS:
            engine.add_request(prompt, greedy(12))
        outputs.extend(out[-1] for out in drain(engine).values())

    threads = [threading.Thread(target=serve, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == len(engines) * len(PROMPTS), "a thread failed"
    for engine in engines:
        engine.close()
    for output in outputs:
        assert_one_answer(MODEL, output, 12)


def test_a_call_of_the_model_waits_while_its_attention_is_switched() -> None:
    model = fresh_model().model
    make_shareable(model)
    expected = model(torch.tensor([[1, 2, 3]])).logits
    answers: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: answers.append(model(torch.tensor([[1, 2, 3]])).logits)
    )
    with attention_switched(model, "an attention that does not exist"):
        thread.start()
        thread.join(timeout=0.2)
        assert not answers and thread.is_alive(), "a forward ran with another engine's attention"
    thread.join()
    assert torch.equal(answers[0], expected)


class InterruptedConfig:
    """A configuration that raises an interrupt right after a change of its attention."""

    def __init__(self) -> None:
        self.name, self.interrupt = "sdpa", True

    @property
    def _attn_implementation(self) -> str:
        return self.name

    @_attn_implementation.setter
    def _attn_implementation(self, name: str) -> None:
        self.name = name
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt


def test_an_interrupt_leaves_a_model_with_its_own_attention() -> None:
    model: Any = torch.nn.Module()
    model.config = InterruptedConfig()
    with pytest.raises(KeyboardInterrupt), attention_switched(model, "ours"):
        raise AssertionError("the switch was interrupted")
    assert model.config.name == "sdpa"
    assert lock_of(model).acquire(blocking=False), "the lock is free again"


def test_a_shareable_model_can_be_copied_and_keeps_its_name() -> None:
    model = load_model(EngineConfig(model=MODEL, device="cpu"), plain=True).model
    make_shareable(model)
    make_shareable(model)
    again = copy.deepcopy(model)
    assert type(model).__name__ == type(again).__name__ == "LlamaForCausalLM"
    assert lock_of(again) is not lock_of(model)
    assert model.state_dict().keys() == shared_model(MODEL).model.state_dict().keys()


def fresh_model() -> LoadedModel:
    return load_model(EngineConfig(model=MODEL, device="cpu"))
