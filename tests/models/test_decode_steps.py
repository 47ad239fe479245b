"""All layers of a decode step as one call of C: the same answers, and only where it may be."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common import EngineConfig, LoadedModel, SamplingParams, load_model
from common.fast.cpu_kernels import kernels
from common.fast.passes.decode import DecodeSteps
from common.fast.passes.layer import joined_layers
from tests.conftest import EngineFactory, ModuleOf, build_engine

pytestmark = [
    pytest.mark.since("m3_paged"),
    pytest.mark.skipif(kernels() is None, reason="this pass needs a C compiler"),
    pytest.mark.cpu,
]
PROMPTS = [[5, 6, 7], [8, 9], list(range(20, 60))]
LOGPROBS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
SAMPLED = SamplingParams(max_tokens=9, temperature=1, seed=3, ignore_eos=True, logprobs=1)


def fresh(passes: str = "all", model: str = "tiny-llama") -> LoadedModel:
    return load_model(EngineConfig(model=model, device="cpu", model_passes=passes))


def steps_of(loaded: LoadedModel) -> DecodeSteps:
    steps: DecodeSteps = joined_layers(loaded.model)[0].steps
    return steps


def answers(engine: Any) -> list[Any]:
    outputs = engine.generate(PROMPTS, [LOGPROBS, SAMPLED, LOGPROBS])
    return [(x.outputs[0].token_ids, x.outputs[0].logprobs) for x in outputs]


@pytest.fixture
def calls(module_of: ModuleOf) -> Iterator[list[int]]:
    """The numbers of the layers, in the order in which Python called their attention."""
    called: list[int] = []
    attention = module_of("attention")
    own = attention.paged_attention

    def noted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(layer.layer_idx)
        return own(layer, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, noted)
    yield called
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, own)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_the_same_bits_as_layer_by_layer(make_engine: EngineFactory, model: str) -> None:
    """The log probabilities have the same bits, while requests join, end and decode together."""
    without = "merge,pack,norm,rotary,gate,layer,last"
    one_call = answers(make_engine(fresh(model=model), max_num_batched_tokens=16))
    by_layer = answers(make_engine(fresh(without, model), max_num_batched_tokens=16))
    assert one_call == by_layer


def test_only_the_first_decode_step_calls_the_attention(
    make_engine: EngineFactory, calls: list[int]
) -> None:
    engine = make_engine(fresh())
    calls.clear()  # the engine has tried its model
    engine.generate([[1, 2, 3]], LOGPROBS)
    assert calls == [0, 1] * 2, "the prefill, and the decode step that is watched"
    calls.clear()
    engine.generate([[4, 5, 6]], LOGPROBS)
    assert calls == [0, 1], "the prefill"


def test_the_loop_over_the_layers_ends_after_the_call(make_engine: EngineFactory) -> None:
    loaded = fresh()
    layers = loaded.model.model.layers
    engine = make_engine(loaded)
    engine.generate([[1, 2, 3]], LOGPROBS)  # the first decode step is watched
    computed: list[int] = []

    def note(module: Any, _: Any) -> None:
        computed.extend(number for number, layer in enumerate(layers) if layer is module)

    with register_module_forward_pre_hook(note):
        engine.generate([[4, 5, 6]], LOGPROBS)
    assert computed[:3] == [0, 1, 0], "the prefill, and the first decode step"
    assert set(computed[2:]) == {0}
    assert len(layers[:]) == len([*layers[:]]) == len([*layers]) == 2
    assert [*layers[1:]] == [layers[1]]


def test_a_model_with_another_loop_over_its_layers(make_engine: EngineFactory) -> None:
    """The other layers return what the first one computed."""
    loaded = fresh()
    expected = answers(make_engine(loaded))
    layers = loaded.model.model.layers
    layers.__class__ = torch.nn.ModuleList
    engine = make_engine(loaded)
    assert answers(engine) == expected
    assert all(steps_of(loaded).recorded.values()), "the steps are calls of C all the same"


def test_each_engine_has_its_own_memory(make_engine: EngineFactory) -> None:
    loaded = fresh()
    first, second = make_engine(loaded), make_engine(loaded)
    assert answers(first) == answers(second) == answers(first)
    assert len(steps_of(loaded).recorded) == 2


def test_the_memory_of_a_closed_engine_is_not_kept(milestone: str) -> None:
    loaded = fresh()
    engine = build_engine(milestone, loaded)
    engine.generate([[1, 2, 3]], LOGPROBS)
    assert len(steps_of(loaded).recorded) == 1
    engine.close()
    del engine
    gc.collect()
    assert not list(steps_of(loaded).recorded)


Attention = Callable[..., Any]


def twice(own: Attention) -> Attention:
    """Return a function that attends twice, as a student might."""

    def attention(layer: Any, *args: Any, **kwargs: Any) -> Any:
        own(layer, *args, **kwargs)
        return own(layer, *args, **kwargs)

    return attention


def nudged(own: Attention) -> Attention:
    """Return a function that changes what the kernels computed."""

    def attention(layer: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = own(layer, *args, **kwargs)
        return output * (1 + 1e-6), weights

    return attention


@pytest.mark.parametrize("change", [twice, nudged])
def test_an_attention_that_does_more_runs_in_each_step(
    make_engine: EngineFactory, module_of: ModuleOf, change: Callable[[Attention], Attention]
) -> None:
    attention = module_of("attention")
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, change(attention.paged_attention))
    try:
        loaded = fresh()
        ours = answers(make_engine(loaded))
        assert list(steps_of(loaded).recorded.values()) == [None]
        assert ours == answers(make_engine(fresh("merge,pack,norm,rotary,gate,layer,last")))
    finally:
        ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.paged_attention)


def test_another_attention_function_is_called(
    make_engine: EngineFactory, module_of: ModuleOf, request: pytest.FixtureRequest
) -> None:
    engine = make_engine(fresh())
    engine.generate([[1, 2, 3]], LOGPROBS)
    calls: list[int] = request.getfixturevalue("calls")
    engine.generate([[4, 5, 6]], LOGPROBS)
    assert len(calls) > 2


def test_a_layer_with_a_hook_is_computed(make_engine: EngineFactory) -> None:
    loaded = fresh()
    engine = make_engine(loaded)
    engine.generate([[1, 2, 3]], LOGPROBS)
    seen: list[torch.Tensor] = []
    layer = joined_layers(loaded.model)[0]
    with layer.register_forward_hook(lambda _, __, output: seen.append(output.clone())):
        engine.generate([[4, 5, 6]], LOGPROBS)
    assert len(seen) >= LOGPROBS.max_tokens
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_a_layer_with_a_forward_of_its_own_is_computed(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = fresh()
    engine = make_engine(loaded)
    engine.generate([[1, 2, 3]], LOGPROBS)
    layer: Any = loaded.model.model.layers[1]
    own, calls = layer.forward, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", counted)
    engine.generate([[4, 5, 6]], LOGPROBS)
    assert len(calls) >= LOGPROBS.max_tokens


def test_a_failed_step_leaves_nothing_behind(make_engine: EngineFactory) -> None:
    """A forward that fails does not change the next forward."""
    expected = answers(make_engine(fresh()))
    loaded = fresh()
    engine = make_engine(loaded)
    engine.generate([[1, 2, 3]], LOGPROBS)
    forwards: list[int] = []

    def fail(*_: Any) -> None:
        forwards.append(1)
        if len(forwards) == 4:
            raise RuntimeError("a failure after the layers")

    with loaded.model.model.norm.register_forward_pre_hook(fail):
        assert answers(engine) == expected
    assert len(forwards) > 4
