"""A model that an engine would compute wrongly is refused at load. The error names the feature."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from common import LoadedModel, UnsupportedModelError
from common.fast.cpu_kernels import kernels
from common.hf.probe import Probe, ProbeError, Span, longest_limit
from common.hf.support import require_full_attention
from common.hf.tiny import ARCHITECTURES
from milestones.chain import load
from tests import conftest
from tests.conftest import EngineFactory, ModuleOf, build_engine, shared_model
from tests.helpers.oracle import assert_same_tokens, generate, greedy
from tests.helpers.tiny_configs import tiny_config

NEEDS_C = pytest.mark.skipif(kernels() is None, reason="no C compiler")
SMALL: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 256, "initializer_range": 0.3,
}  # fmt: skip


def random_model(config: PretrainedConfig) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    return LoadedModel(config.model_type, model, shared_model("tiny-llama").tokenizer)


def config_of(model_type: str, **extra: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**SMALL, **extra})


WINDOWS = {
    "sliding window": (
        config_of("mistral", num_key_value_heads=2, sliding_window=8),
        "sliding_window=8",
    ),
    "some sliding layers": (
        config_of("gemma3_text", num_key_value_heads=2, head_dim=8, sliding_window=8),
        "sliding_window=8",
    ),
    "soft cap": (
        config_of("gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4096),
        "attn_logit_softcapping",
    ),
}  # fmt: skip
REFUSED = {
    "ALiBi": (
        AutoConfig.for_model("bloom", vocab_size=259, hidden_size=32, n_layer=2, n_head=4),
        "ALiBi",
    ),
    "dynamic RoPE": (
        config_of(
            "llama",
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0,
                             "original_max_position_embeddings": 32},
        ),
        "rope_type=dynamic",
    ),
    "recurrent layers": (
        AutoConfig.for_model("mamba", vocab_size=259, hidden_size=32, num_hidden_layers=2),
        "linear_attention|KV cache|recurrent state",
    ),
    "a later temperature": (
        tiny_config("llama4_text", attn_temperature_tuning=True, floor_scale=8),
        "temperature-tuned.*floor_scale=8",
    ),
    "chunks": (
        tiny_config("llama4_text", attention_chunk_size=8),
        "chunked attention .attention_chunk_size=8",
    ),
}  # fmt: skip


@pytest.mark.since("m2_continuous")
@pytest.mark.before("hybrid_memory")
@pytest.mark.parametrize(("config", "message"), WINDOWS.values(), ids=WINDOWS)
def test_windows_and_soft_caps_are_refused(
    make_engine: EngineFactory, config: PretrainedConfig, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(random_model(config), max_model_len=64)


@pytest.mark.since("m2_continuous")
@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_feature(
    make_engine: EngineFactory, config: PretrainedConfig, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(random_model(config), max_model_len=64)


def test_a_window_that_no_context_reaches_is_no_obstacle(make_engine: EngineFactory) -> None:
    """Within its window, a model with a sliding window computes plain causal attention."""
    loaded = random_model(config_of("mistral", num_key_value_heads=2, sliding_window=64))
    engine = make_engine(loaded, max_model_len=64, max_num_seqs=2)
    for output in engine.generate([[1, 2, 3], list(range(30))], greedy(20)):
        expected = generate(loaded, tuple(output.prompt_token_ids), 20)
        assert_same_tokens(expected, output.outputs[0].token_ids)


@pytest.mark.before("m2_continuous")
def test_hugging_faces_own_cache_slides(make_engine: EngineFactory) -> None:
    """m1 leaves the cache to Hugging Face, and so it serves a model that the others refuse."""
    loaded = random_model(config_of("mistral", num_key_value_heads=2, sliding_window=8))
    output = make_engine(loaded).generate([list(range(30))], greedy(20))[0]
    expected = generate(loaded, tuple(output.prompt_token_ids), 20)
    assert_same_tokens(expected, output.outputs[0].token_ids)


def test_encoder_decoders_are_refused_on_every_milestone(
    milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    from common import EngineConfig
    from common.hf import model_loading

    loaded = shared_model("tiny-llama")
    monkeypatch.setattr(loaded.model.config, "is_encoder_decoder", True)
    monkeypatch.setattr(model_loading, "_read", lambda *_: (loaded.model, loaded.tokenizer))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load(milestone).LLMEngine(EngineConfig(model="some/t5"))


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_supported_architectures_tell_their_kv_shape(architecture: str) -> None:
    model = shared_model(f"tiny-{architecture}").model
    layers = require_full_attention(model, 512)
    assert len(layers) == 2
    heads = getattr(model.config, "num_key_value_heads", None) or 4
    head_dim = getattr(model.config, "head_dim", None) or 16
    assert {(kv.num_kv_heads, kv.key_dim, kv.value_dim) for kv in layers} == {
        (heads, head_dim, head_dim)
    }


def test_a_model_that_ignores_the_mask_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration tells that a model ignores the mask. A trial run finds it."""
    model = shared_model("tiny-llama").model
    forward = model.forward

    def sees_all(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = torch.zeros_like(attention_mask)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(model, "forward", sees_all)
    with pytest.raises(UnsupportedModelError, match="4-D attention mask"):
        require_full_attention(model, 512)


@pytest.mark.since("m2_continuous")
def test_a_model_that_is_right_alone_and_wrong_beside_others_is_refused(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This model takes the position of a request from the longest request of the batch."""
    loaded = random_model(config_of("llama", num_key_value_heads=2))
    rotary: Any = loaded.model.model.rotary_emb
    forward = rotary.forward

    def from_the_longest(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        last = position_ids.max()
        positions = torch.arange(int(last) + 1 - position_ids.shape[1], int(last) + 1)
        return forward(x, positions.expand_as(position_ids))

    monkeypatch.setattr(rotary, "forward", from_the_longest)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM \(llama\)"):
        make_engine(loaded, max_model_len=64)


def test_a_probe_exceeds_the_windows_that_a_request_can_outgrow() -> None:
    config = config_of("mistral", sliding_window=40)
    assert longest_limit(config, max_model_len=64) == 40
    assert longest_limit(config, max_model_len=40) == 0, "no request can outgrow the window"
    assert longest_limit(config_of("llama"), max_model_len=64) == 0
    model = random_model(config).model
    spans = [span for step in Probe(model, 64).mixed() for span in step]
    assert max(span.end for span in spans) > 40
    assert max(span.end for span in Probe(model, 32).one_at_a_time()) < 16, "the probe is too long"


@pytest.mark.parametrize("max_model_len", range(2, 10))
def test_a_probe_fits_the_longest_request(max_model_len: int) -> None:
    """A probe computes each token of a request once and in order, with decodes before chunks."""
    probe = Probe(shared_model("tiny-llama").model, max_model_len)
    assert probe.again()
    for steps in (probe.batched(), probe.mixed(), [[span] for span in probe.one_at_a_time()]):
        for row in (0, 1):
            spans = [span for step in steps for span in step if span.row == row]
            assert spans[0].start == 0 and spans[-1].end <= max_model_len
            assert all(a.end == b.start < b.end for a, b in itertools.pairwise(spans))
    for step in probe.mixed():
        lengths = [span.end - span.start > 1 for span in step]
        assert lengths == sorted(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong_attempts", [0, 1, 9])
def test_low_precision_is_probed_again_with_other_tokens(
    dtype: torch.dtype, wrong_attempts: int
) -> None:
    """Rounding may send a token to another expert. A wrong model is wrong with all tokens."""
    model: Any = random_model(config_of("llama")).model
    model = model.to(dtype)
    probe, accepted = Probe(model, 64), False
    step = [Span(0, 0, 5)]
    with contextlib.suppress(ProbeError):
        while probe.again():
            logits = model(torch.tensor([probe.tokens_of(step[0])]), use_cache=False).logits[:, -1]
            probe.check(step, logits.roll(7) if probe.attempt <= wrong_attempts else logits)
        accepted = True
    assert accepted == (wrong_attempts == 0 or (wrong_attempts == 1 and dtype == torch.bfloat16))


def test_a_model_with_logits_of_0_is_computed(make_engine: EngineFactory) -> None:
    """An error is a fraction of the largest logit. If all are 0, a 0 is still right."""
    loaded = random_model(config_of("llama"))
    head: Any = loaded.model.get_output_embeddings()
    torch.nn.init.zeros_(head.weight)
    (output,) = make_engine(loaded, max_model_len=64).generate([[1, 2]], greedy(3))
    assert output.outputs[0].token_ids == [0, 0, 0]


@pytest.mark.parametrize("wrong", [1e-30, float("nan"), float("inf")])
def test_a_logit_that_should_be_0_is_wrong(wrong: float) -> None:
    loaded = random_model(config_of("llama"))
    head: Any = loaded.model.get_output_embeddings()
    torch.nn.init.zeros_(head.weight)
    probe, step = Probe(loaded.model, 64), [Span(0, 0, 5)]
    assert probe.again()
    logits = torch.zeros(1, loaded.vocab_size)
    logits[0, 7] = wrong
    probe.check(step, logits)
    with pytest.raises(ProbeError):
        probe.again()


@pytest.mark.thorough("nine models on three engines")
@pytest.mark.since("m3_paged")
@pytest.mark.parametrize("backend", ["torch", pytest.param("compiled", marks=NEEDS_C), "triton"])
def test_keys_and_values_of_different_sizes(make_engine: EngineFactory, backend: str) -> None:
    """In DeepSeek's models, keys and values differ in size: here 24 and 12 numbers."""
    loaded = random_model(tiny_config("deepseek_v3"))
    engine = make_engine(loaded, attention_backend=backend, max_model_len=64, page_size=4)
    pool = engine.core.runner.kv_pool  # type: ignore[attr-defined]
    scale = 4 if "kv_quant" in conftest.UNDER_TEST else 0  # bytes, beside numbers of a byte
    assert (pool.keys[0].shape[-1], pool.values[0].shape[-1]) == (24 + scale, 12 + scale)
    for output in engine.generate([[7], list(range(9))], greedy(3)):
        expected = generate(loaded, tuple(output.prompt_token_ids), 3)
        assert_same_tokens(expected, output.outputs[0].token_ids)


@pytest.mark.since("m3_paged")
def test_a_mistake_in_the_engine_is_not_blamed_on_the_model(
    milestone: str, module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's mistake in `flatten` shows its own exception, and not a feature of the model."""

    def broken(*_: object) -> None:
        raise IndexError("here")

    monkeypatch.setattr(module_of("model_input").InputBuilder, "flatten", broken)
    with pytest.raises(IndexError, match="here"):
        build_engine(milestone)
