"""The passes over a model's modules make it faster and leave its function unchanged."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as interleaved
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from common import EngineConfig, load_model
from common.fast import passes
from common.fast.passes import PASSES, apply_passes, pack
from common.fast.passes import layer as layer_module
from common.fast.passes.gate import fuse_gates
from common.fast.passes.layer import joined_layers
from common.fast.passes.layer_parts import TorchParts, TritonParts
from common.fast.passes.merge import merge_linears
from common.fast.passes.norm import speed_up_norms
from common.fast.passes.replace import replace_forward
from common.fast.passes.rotary import Rotary, signed
from common.hf.tiny import ARCHITECTURES
from tests.conftest import plain_model
from tests.helpers.compile_report import compile_report
from tests.helpers.tiny_configs import tiny_config

ON_CPU = "merge", "pack", "norm", "rotary", "merge,layer", "merge,layer,last"


def unchanged(architecture: str) -> PreTrainedModel:
    return load_model(EngineConfig(model=f"tiny-{architecture}", device="cpu"), plain=True).model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("names", [*ON_CPU, "all"])
def test_a_model_computes_what_it_did(architecture: str, names: str) -> None:
    model, plain = unchanged(architecture), plain_model(f"tiny-{architecture}").model
    apply_passes(model, names)
    tokens = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=1e-4, rtol=1e-4)


def test_each_pass_finds_its_modules() -> None:
    assert apply_passes(unchanged("llama")) == {
        "merge": 4,  # q/k/v and gate/up, of two layers
        "pack": 2 * 4 + 1,  # the merged ones, the outputs, the head
        "norm": 2 * 2 + 1,
        "rotary": 2,
        "gate": 0,  # on CUDA only
        "layer": 2,
        "last": 1,
        "decode": 0 if pack.kernels() is None else 2,
    }


def test_parameters_keep_their_names_and_values() -> None:
    model, plain = unchanged("llama"), plain_model("tiny-llama").model
    apply_passes(model)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_merged_weights_are_held_once() -> None:
    model: Any = unchanged("llama")
    merge_linears(model)
    layer = model.model.layers[0].self_attn
    whole = layer.q_proj.product.linear.weight
    assert layer.k_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_merged_layers_answer_for_the_tensor_they_are_given() -> None:
    model: Any = unchanged("qwen2")  # with biases
    merge_linears(model)
    layer, plain = model.model.layers[0].self_attn, plain_model("tiny-qwen2").model
    theirs: Any = plain.model.layers[0].self_attn
    x, other = torch.randn(2, 1, 3, 64)
    for name, given in (("q_proj", x), ("k_proj", other), ("v_proj", x), ("v_proj", other)):
        expected = getattr(theirs, name)(given)
        torch.testing.assert_close(getattr(layer, name)(given), expected, atol=1e-5, rtol=1e-5)
    assert layer.q_proj.product._latest is None, "the product holds an input after its last use"


def test_a_packed_row_does_not_depend_on_its_neighbours() -> None:
    """I2: the bits of a row are the same in a product of any number of rows."""
    model: Any = unchanged("llama")
    apply_passes(model, "pack")
    linear, x = model.lm_head, torch.randn(70, 64)
    alone = torch.cat([linear(row) for row in x.split(1)])
    for rows in (2, 3, 7, 16, 33, 70):
        assert torch.equal(linear(x[:rows]), alone[:rows]), f"{rows} rows"


def test_weights_stay_plain_where_nothing_can_pack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: nn.Linear) -> pack.Product:
        raise RuntimeError("no such operator")

    def wrong(linear: nn.Linear) -> pack.Product:
        return lambda x: F.linear(x, linear.weight) + 1

    monkeypatch.setattr(pack, "PACKINGS", (missing, wrong))
    model: Any = unchanged("llama")
    assert apply_passes(model, "pack") == {"pack": 0}
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("packing", pack.PACKINGS)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_all_packings_compute_a_linear_layer(packing: pack.Packing, rows: int) -> None:
    linear, x = nn.Linear(48, 80), torch.randn(2, rows, 48)
    if not pack.is_right(packing, linear):
        pytest.skip("not on this machine")
    with torch.no_grad():
        ours = packing(linear)(x)
        torch.testing.assert_close(ours, linear(x), atol=1e-5, rtol=1e-5)


def test_a_norm_of_another_kind_keeps_its_own_forward() -> None:
    """Gemma's norm is another one: it multiplies by 1 + weight."""
    gemma, llama = GemmaRMSNorm(32), LlamaRMSNorm(32)
    nn.init.uniform_(gemma.weight)
    with torch.no_grad():
        assert speed_up_norms(nn.Sequential(gemma, llama)) == 1
    assert type(gemma) is GemmaRMSNorm


def test_a_norm_of_zeros_is_zero() -> None:
    norm = LlamaRMSNorm(32)
    with torch.no_grad():
        speed_up_norms(nn.Sequential(norm))
        assert torch.equal(norm(torch.zeros(2, 32)), torch.zeros(2, 32))


def rotary_case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    heads = torch.randn(2, 7, 6, 16).to(dtype).transpose(1, 2)  # 4 heads of q and 2 of k, 7 tokens
    angles = torch.randn(2, 7, 8).repeat(1, 1, 2)
    return heads[:, :4], heads[:, 4:], angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("apart", [False, True])
def test_rotary(num_tokens: int, apart: bool) -> None:
    q, k, cos, sin = (x[..., :num_tokens, :] for x in rotary_case())
    q = q.clone() if apart else q
    ours = Rotary(apply_rotary_pos_emb)(q, k, cos, sin)
    for turned, expected in zip(ours, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(turned, expected)


def test_rotary_of_a_part_of_each_head_is_the_models_own() -> None:
    tokens = torch.arange(20)[None]
    model, plain = unchanged("gpt_neox"), plain_model("tiny-gpt_neox").model
    assert apply_passes(model, "rotary") == {"rotary": 2}
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_rotary_of_another_layout_keeps_its_own() -> None:
    from common.fast.passes.rotary import _is_same

    assert not _is_same(Rotary(interleaved), torch.zeros(1))


def test_layers_of_another_kind_keep_their_own_forward() -> None:
    """These are layers with a window, with a scaled residual, or with separate products."""
    model: Any = unchanged("llama")
    assert apply_passes(model, "layer") == {"layer": 0}
    merge_linears(model)
    model.model.layers[0].self_attn.sliding_window = 8
    assert apply_passes(model, "layer") == {"layer": 1}
    scaled: Any = unchanged("granite")
    for layer in scaled.model.layers:
        layer.residual_multiplier = 0.5
    assert apply_passes(scaled, "merge,layer")["layer"] == 0


def test_where_a_part_of_a_head_is_turned_a_layers_own_code_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = unchanged("llama")
    own = type(model.model.layers[0])
    assert apply_passes(model, "merge,layer")["layer"] == 2
    monkeypatch.setattr(own, "forward", lambda *_, **__: "its own")
    layer, x = model.model.layers[0], torch.randn(1, 3, 64)
    whole, half = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3, 8)
    with torch.no_grad():
        assert layer(x, position_embeddings=tuple(half)) == "its own"
        assert layer(x) == "its own", "a layer without rotary embedding runs the pass's code"
        assert layer(x, position_embeddings=tuple(whole)).shape == x.shape


@pytest.mark.parametrize("answer", [None, (torch.zeros(2, 5, 64),), RuntimeError("not so")])
def test_a_layer_that_cannot_be_compared_keeps_its_own_forward(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = unchanged("llama")
    merge_linears(model)

    def forward(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    assert apply_passes(model, "layer") == {"layer": 0}


def test_attention_that_does_more_than_llamas_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OLMo clips large numbers, and the inputs of a trial may have none."""
    model: Any = unchanged("llama")
    merge_linears(model)
    own = type(model.model.layers[0].self_attn).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.hidden_size > 1e6:
            self.clip_qkv()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    assert apply_passes(model, "layer") == {"layer": 0}
    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", functools.partial(own))
    assert apply_passes(model, "layer") == {"layer": 0}, "a forward without readable source"


def test_a_layer_with_parts_that_cannot_be_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm may have no weight, or a part may raise when it is called."""
    model: Any = unchanged("llama")
    merge_linears(model)
    for layer in model.model.layers:
        layer.input_layernorm = nn.LayerNorm(64, elementwise_affine=False)
    monkeypatch.setattr("common.fast.passes.layer_parts.TorchParts.after", lambda *_: 1 / 0)
    assert apply_passes(model, "layer") == {"layer": 0}
    with torch.no_grad():
        assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_a_joined_layer_asks_for_the_attention_of_each_forward() -> None:
    """Engines that share a model switch its attention for each forward."""
    model: Any = unchanged("llama")
    apply_passes(model)
    tokens, calls = torch.arange(6)[None], list[int]()

    def counted(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> Any:
        calls.append(module.layer_idx)
        return query.transpose(1, 2), None

    AttentionInterface.register("counted", counted)
    with torch.inference_mode():
        before = model(tokens).logits
        model.config._attn_implementation = "counted"
        model(tokens)
        model.config._attn_implementation = "sdpa"
        assert torch.equal(model(tokens).logits, before)
    assert calls == [0, 1]


WANTED = [0, 1, 3, 6, 9, torch.tensor([2]), torch.tensor([5, 0]), torch.tensor([0, 1, 2, 3, 4, 5])]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_last_layer_leaves_out_what_the_head_leaves_out(
    wanted: int | torch.Tensor, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits have the same bits as without the pass, and only wanted tokens are computed."""
    full, trimmed = unchanged("llama"), unchanged("llama")
    apply_passes(full, "merge,pack,norm,rotary,layer")
    assert apply_passes(trimmed)["last"] == 1
    prompt, computed = torch.arange(6 * batch).view(batch, 6), list[int]()
    parts = trimmed.model.layers[1].parts
    after = parts.after

    def counted(attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        computed.append(x.shape[1])
        return after(attended, x)

    monkeypatch.setattr(parts, "after", counted)
    with torch.inference_mode():
        ours = trimmed(input_ids=prompt, logits_to_keep=wanted).logits
        theirs = full(input_ids=prompt, logits_to_keep=wanted).logits
        assert torch.equal(ours, theirs)
    assert computed == [theirs.shape[1]]


def test_hidden_states_that_are_asked_for_are_whole() -> None:
    model, prompt = unchanged("llama"), torch.arange(6)[None]
    assert apply_passes(model)["last"] == 1
    with torch.inference_mode():
        answer = model(input_ids=prompt, logits_to_keep=1, output_hidden_states=True)
        assert [x.shape[1] for x in answer.hidden_states] == [6, 6, 6]
        assert answer.logits.shape[1] == 1
        again = model(prompt, logits_to_keep=1)  # a positional prompt turns the pass off
        assert torch.equal(again.logits, answer.logits)


def test_a_last_layer_that_others_read_is_not_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is not trimmed in three kinds of models.

    The first mixes the hidden states of its tokens. The second does not pass `tokens_to_keep` on to
    its layers. The third cannot be asked for some of the logits only.
    """
    mixing: Any = unchanged("llama")
    norm = mixing.model.norm.forward
    mixing.model.norm.forward = lambda x: norm(x - x.mean(dim=1, keepdim=True))
    assert apply_passes(mixing)["last"] == 0
    assert not mixing._forward_pre_hooks
    deaf: Any = unchanged("llama")
    forward = deaf.model.forward
    monkeypatch.setattr(
        deaf.model, "forward", lambda tokens_to_keep=None, **kwargs: forward(**kwargs)
    )
    assert apply_passes(deaf)["last"] == 0
    with torch.inference_mode():
        assert deaf(input_ids=torch.arange(6)[None], logits_to_keep=2).logits.shape[1] == 2
    whole: Any = unchanged("llama")
    monkeypatch.setattr(whole, "forward", lambda input_ids, use_cache: None)
    assert apply_passes(whole)["last"] == 0


def test_passes_can_be_turned_off_and_chosen() -> None:
    def classes(names: str) -> set[str]:
        loaded = load_model(EngineConfig(model="tiny-llama", device="cpu", model_passes=names))
        return {type(module).__module__ for module in loaded.model.modules()}

    plain = load_model(EngineConfig(model="tiny-llama", device="cpu"), plain=True)
    own = {type(module).__module__ for module in plain.model.modules()}
    assert classes("none") == own
    assert classes("norm") - own == {"common.fast.passes.replace"}
    with pytest.raises(ValueError, match=r"model_passes must be .*merge.*'warp'"):
        classes("norm, warp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_twins(dtype: torch.dtype) -> None:
    """The interpreted CUDA kernels agree with the modules that they replace."""
    from common.fast.passes import triton_kernels
    from common.fast.passes.replace import TOLERANCE

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    norm = LlamaRMSNorm(24).to(dtype)
    nn.init.uniform_(norm.weight)
    heads = torch.randn(1, 5, 10, 24).to(dtype)[:, :, :4]  # q of a merged product: a view
    for x in (heads, heads[0], torch.randn(3, 24).to(dtype)):
        ours = triton_kernels.rms_norm(x, norm.weight, norm.variance_epsilon)
        close(ours, norm(x))
    q, k, cos, sin = rotary_case(dtype)
    turned = triton_kernels.rotate(q, k, cos, sin)
    for ours, theirs in zip(turned, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        close(ours, theirs)
        if dtype == torch.float16:  # the interpreter rounds bfloat16 differently
            assert torch.equal(ours, theirs), "the kernel rounds differently from the model"
    gate, up = torch.randn(1, 5, 2 * 1500).to(dtype).chunk(2, dim=-1)
    ours = triton_kernels.silu_mul(gate, up)
    close(ours, F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 576, 1])
def test_a_sum_and_its_norm_in_one_kernel(dtype: torch.dtype, size: int) -> None:
    from common.fast.passes import triton_kernels
    from common.fast.passes.replace import TOLERANCE

    norm = LlamaRMSNorm(size).to(dtype)
    nn.init.uniform_(norm.weight)
    x, residual = torch.randn(1, 5, size).to(dtype), torch.randn(1, 5, 2 * size).to(dtype)
    residual = residual[:, :, :size]  # a view with rows of another stride
    expected = residual + x
    total, normed = triton_kernels.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    rounding = TOLERANCE[dtype]
    assert total is x and torch.allclose(total, expected, atol=rounding, rtol=rounding)
    torch.testing.assert_close(normed, norm(expected), atol=rounding, rtol=rounding)
    if dtype == torch.float16:  # the interpreter rounds bfloat16 differently
        assert torch.equal(total, expected), "the kernel rounds differently from the model"
    with pytest.raises(AssertionError, match="memory of x"):
        triton_kernels.add_rms_norm(residual, x, norm.weight, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 24), ((3, 1), 80), ((1, 1), 2)], ids=str)
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_normed_and_rotated_in_one_kernel(
    dtype: torch.dtype, heads: tuple[int, int], dim: int, has_norms: bool
) -> None:
    """In place, as the modules compute and round it. The values stay as they are."""
    from common.fast.passes import triton_kernels
    from common.fast.passes.replace import TOLERANCE

    norms = [LlamaRMSNorm(dim).to(dtype) for _ in heads]
    for norm in norms:
        nn.init.uniform_(norm.weight)
    qkv = torch.randn(2, 5, (heads[0] + 2 * heads[1]) * dim).to(dtype)
    angles = torch.randn(2, 5, dim // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, v = (part.clone() for part in qkv.view(2, 5, -1, dim).split([*heads, heads[1]], dim=2))
    if has_norms:
        q, k = norms[0](q), norms[1](k)
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    weights = (norms[0].weight, norms[1].weight) if has_norms else None
    triton_kernels.norm_and_rotate(
        qkv, heads, dim, cos[:, :, None].contiguous(), signed(sin)[:, :, None].contiguous(),
        weights, norms[0].variance_epsilon,
    )  # fmt: skip
    *ours, values = qkv.view(2, 5, -1, dim).split([*heads, heads[1]], dim=2)
    assert torch.equal(values, v), "the values were changed"
    for got, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(
            got.transpose(1, 2), theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_layers_with_fused_kernels_compute_what_they_did(
    architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a GPU, on interpreted kernels; with a cache, too."""
    monkeypatch.setattr(layer_module, "CompiledParts", TritonParts)
    model: Any = unchanged(architecture)
    plain: Any = unchanged(architecture)
    model, plain = model.to(dtype), plain.to(dtype)
    assert apply_passes(model, "merge,layer")["layer"] == 2
    assert all(type(layer.parts) is TritonParts for layer in joined_layers(model))
    tokens = torch.arange(14).view(2, 7)
    with torch.inference_mode():
        theirs = plain(tokens, use_cache=True)
        ours = model(tokens, use_cache=True)
        more = [m(tokens[:, :1], past_key_values=x.past_key_values).logits
                for m, x in ((model, ours), (plain, theirs))]  # fmt: skip
    largest = theirs.logits.abs().max()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for got, expected in ((ours.logits, theirs.logits), more):
        assert float((got - expected).abs().max() / largest) < tolerance


def test_fused_kernels_leave_other_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "CompiledParts", TritonParts)
    model: Any = unchanged("qwen3")
    first, second = model.model.layers
    first.mlp.act_fn = nn.GELU()
    second.self_attn.k_norm.variance_epsilon = 0.5
    apply_passes(model, "merge,layer")
    assert [type(layer.parts) for layer in joined_layers(model)] == [TorchParts, TorchParts]


def test_kernels_that_fail_on_a_gpu_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a C compiler, m1 and m2 run Hugging Face's modules on a GPU. A log says why."""
    triton_kernels = pytest.importorskip("common.fast.passes.triton_kernels")
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1, 16))
    passes._warn_without_kernels(torch.device("cuda"), torch.float32)
    passes._warn_without_kernels(torch.device("cpu"), torch.float32)
    assert not caplog.text
    monkeypatch.setattr(triton_kernels, "silu_mul", lambda *_: 1 / 0)
    passes._warn_without_kernels(torch.device("cuda"), torch.float32)
    assert caplog.text.count("division by zero") == 1


def test_gates_are_fused_on_cuda_only() -> None:
    assert fuse_gates(unchanged("llama")) == 0


@pytest.mark.thorough("it compiles each kernel for six kinds of GPU")
def test_kernels_compile_for_real_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    report = compile_report("common.fast.passes.triton_kernels", tmp_path_factory)
    assert len(report) == 6 * (2 + 3 + 3)
    assert all(entry["spill_stores"] == 0 for entry in report)


def test_every_pass_is_documented() -> None:
    import common.fast.passes as passes

    assert passes.__doc__ is not None
    assert all(f"\n    {name} " in passes.__doc__ for name in PASSES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_as_the_model_rounds(dtype: torch.dtype) -> None:
    """Different rounding would send some tokens of a mixture to other experts."""
    q, k, cos, sin = rotary_case(dtype)
    for ours, theirs in zip(
        Rotary(apply_rotary_pos_emb)(q, k, cos, sin),
        apply_rotary_pos_emb(q, k, cos, sin),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("names", ["rotary", "norm", "last", "rotary,norm,last"])
def test_a_mixture_of_experts_keeps_its_tokens_in_low_precision(names: str) -> None:
    torch.manual_seed(0)
    config = tiny_config("mixtral", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    tokens = torch.arange(5, 5 + 31 * 60, 31)[None] % 250
    with torch.inference_mode():
        before = model(tokens, use_cache=False).logits
        apply_passes(model, names)
        assert torch.equal(model(tokens, use_cache=False).logits, before)


class _Unusual(nn.Module):
    """A module with the names that a pass looks for, but with another function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6
        self.gate_proj = self.up_proj = self.down_proj = nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
        return x * needed


def test_passes_stand_back_from_modules_that_they_do_not_know() -> None:
    class UnusualRMSNorm(_Unusual):
        pass

    model: Any = nn.Sequential(UnusualRMSNorm(), nn.Linear(8, 8))
    assert speed_up_norms(model) == 0
    assert type(model[0]) is UnusualRMSNorm and not hasattr(model[0], "scaled_weight")
    assert replace_forward(model[0], nn.Identity, {"marked": 1}, torch.ones(8)) is False
    assert type(model[0]) is UnusualRMSNorm and not hasattr(model[0], "marked")


@pytest.mark.parametrize("model_type", ["gpt_oss", "falcon_mamba", "xlm", "deepseek_v3"])
def test_passes_do_not_break_models_of_other_kinds(model_type: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    tokens = torch.arange(1, 13)[None]
    with torch.inference_mode():
        before = model(tokens, use_cache=False).logits
        apply_passes(model)
        after = model(tokens, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
