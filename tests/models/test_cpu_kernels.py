"""The kernels in C: compiled here, compared with torch, and the same bits in any batch (I2).

Most of these tests need a C compiler. Others test that everything works without one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from common import EngineConfig, load_model
from common.cpu import MARCH
from common.fast.cpu_kernels import Kernels, Linear, build, kernels
from common.fast.passes import apply_passes, pack
from common.fast.passes.layer_parts import CompiledParts, TorchParts
from common.fast.stored.weight import StoredWeight
from tests.conftest import plain_model
from tests.helpers.process import run_python
from tests.models.conftest import on_threads

pytestmark = pytest.mark.cpu


@pytest.mark.skipif(sys.platform != "linux", reason="these flags are for compilers on Linux")
@pytest.mark.skipif("CC" in os.environ, reason="CC names another compiler")
def test_a_machine_with_gcc_has_the_kernels() -> None:
    assert kernels() is not None or not shutil.which("gcc")


SIZES = [(1, 1), (7, 3), (16, 16), (64, 48), (65, 33), (576, 960), (130, 1001)]
ROWS = [1, 2, 6, 7, 13, 48, 49, 100]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_linear_layer(compiled: Kernels, inputs: int, outputs: int) -> None:
    x, weight, bias = torch.randn(100, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    kept = [StoredWeight.of_floats(weight, compiled.panel_size)]
    assert torch.equal(kept[0].dequantize(), weight)
    for given in (None, bias):
        linear = Linear.of(kept, given)
        alone = torch.cat([compiled.linear(row, linear) for row in x.split(1)])
        expected = F.linear(x.double(), weight.double(), None if given is None else bias.double())
        torch.testing.assert_close(alone.double(), expected, atol=1e-4, rtol=1e-4)
        for rows in ROWS:
            ours = compiled.linear(x[:rows], linear)
            assert torch.equal(ours, alone[:rows]), f"I2: {rows} rows give a row other bits"


def test_any_number_of_threads_computes_the_same_bits(compiled: Kernels) -> None:
    weight, x = torch.randn(100, 50), torch.randn(9, 50)
    linear = Linear.of(kept := [StoredWeight.of_floats(weight, compiled.panel_size)], None)
    assert kept[0].panel_size == compiled.panel_size
    first, *others = on_threads(lambda: compiled.linear(x, linear))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("width", [64, 96, 100])
def test_gates_of_any_width_and_with_biases(compiled: Kernels, width: int) -> None:
    """A width need not be a whole number of panels."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, mlp_bias=True, attention_bias=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(50)[None]
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(pack, "kernels", lambda: compiled)
        plain = model(tokens).logits
        assert apply_passes(model)["layer"] == 1
        assert type(model.model.layers[0].parts) is CompiledParts
        torch.testing.assert_close(model(tokens).logits, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_whole_model(compiled: Kernels, architecture: str) -> None:
    """The models have biases or norms of heads. The bits are the same alone and in a batch."""
    name = f"tiny-{architecture}"
    model = with_passes(name, compiled)
    layer = model.model.layers[0]
    assert type(layer.parts) is CompiledParts
    tokens = torch.arange(60).view(3, 20)
    with torch.inference_mode():
        ours, theirs = model(tokens).logits, plain_model(name).model(tokens).logits
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        parts, x = layer.parts, torch.randn(3, 20, 64)
        half = layer.self_attn.head_dim // 2
        angles = torch.randn(1, 20, half).repeat(1, 1, 2)  # all rows of the batch share the angles
        embeddings = angles.cos(), angles.sin()
        together = parts.before(x, parts.forwards(embeddings, x.shape[:2]))
        attended = torch.randn_like(together[0].transpose(1, 2))
        answers = parts.after(attended, x)
        for row in range(3):
            one = slice(row, row + 1)
            alone = parts.before(x[one], parts.forwards(embeddings, x[one].shape[:2]))
            assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))
            assert torch.equal(parts.after(attended[one], x[one]), answers[one])


def test_what_c_would_misread_is_refused(compiled: Kernels) -> None:
    weights = [StoredWeight.of_floats(torch.randn(8, 5), compiled.panel_size)]
    linear = Linear.of(weights, None)
    with pytest.raises(TypeError, match="float32 on a CPU, got torch.float16"):
        compiled.linear(torch.zeros(2, 5, dtype=torch.float16), linear)
    with pytest.raises(ValueError, match="must be 5, got 6"):
        compiled.linear(torch.zeros(2, 6), linear)


def test_a_layer_that_is_given_what_is_not_its_own_refuses(compiled: Kernels) -> None:
    model = with_passes("tiny-llama", compiled)
    parts, x = model.model.layers[0].parts, torch.zeros(2, 3, 64)
    angles = torch.zeros(1, 3, model.model.layers[0].self_attn.head_dim)
    forward = parts.forwards((angles, angles), x.shape[:2])
    attended = parts.before(x, forward)[0].transpose(1, 2)
    assert parts.after(attended, x).shape == x.shape
    for wrong in (x[:1], x[:, :2], x[..., :32]):
        with pytest.raises(ValueError, match="does not fit heads"):
            parts.before(wrong, forward)
        with pytest.raises(ValueError, match="does not fit x"):
            parts.after(attended, wrong)
    for kind in (torch.float16, torch.float64):
        with pytest.raises(TypeError, match="float32 on a CPU"):
            parts.before(x.to(kind), forward)
        with pytest.raises(TypeError, match="float32 on a CPU"):
            parts.forwards((angles.to(kind), angles.to(kind)), x.shape[:2]).heads((4, 2, 2))


def test_a_cache_may_keep_what_it_is_given(compiled: Kernels) -> None:
    """A cache may keep the k and v of a layer, although all layers use the same memory in turn."""

    class Keeping:
        def __init__(self) -> None:
            self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any) -> Any:
            self.kept[layer] = k, v
            return k, v

    cache, x = Keeping(), torch.randn(1, 5, 64)
    layers = with_passes("tiny-llama", compiled).model.layers
    angles = torch.randn(1, 5, layers[0].self_attn.head_dim // 2).repeat(1, 1, 2)
    given: Any = {"position_embeddings": (angles.cos(), angles.sin())}
    with torch.inference_mode():
        for layer in layers:
            x = layer(x, past_key_values=cache, **given)
        again = {i: torch.cat(kept, dim=-1).clone() for i, kept in cache.kept.items()}
        assert not torch.equal(again[0], again[1])
        alone = Keeping()
        layers[0](torch.randn(1, 5, 64), past_key_values=alone, **given)
        layers[1](torch.randn(1, 5, 64), past_key_values=alone, **given)
    assert all(torch.equal(torch.cat(kept, dim=-1), again[i]) for i, kept in cache.kept.items())


def with_passes(name: str, compiled: Kernels) -> Any:
    """Return a model of two layers and width 64 that runs on these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "kernels", lambda: compiled)
        model = load_model(EngineConfig(model=name, device="cpu"), plain=True).model
        assert apply_passes(model)["layer"] == 2
    return model


def test_passes_may_be_applied_again() -> None:
    """The second time, nothing is packed again: the memory that a compiled layer reads stays."""
    model: Any = load_model(EngineConfig(model="tiny-llama", device="cpu"), plain=True).model
    apply_passes(model)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        assert apply_passes(model, "merge,pack") == {"merge": 0, "pack": 0}
        assert torch.equal(model(tokens).logits, before)


def test_a_layer_of_other_arithmetic_is_not_compiled() -> None:
    """With another activation, a layer runs on torch's operations and gives the same answer."""
    model: Any = load_model(EngineConfig(model="tiny-llama", device="cpu"), plain=True).model
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        assert apply_passes(model)["layer"] == 2
        assert type(model.model.layers[0].parts) is TorchParts
        torch.testing.assert_close(model(tokens).logits, before, atol=1e-4, rtol=1e-4)


@pytest.mark.thorough("a process that imports torch")
def test_without_a_compiler_everything_still_runs(tmp_path: Path) -> None:
    """Torch's own products and attention run, and the answer is the reference's."""
    program = """
import sys
from common.fast.cpu_kernels import kernels
from common.fast.passes import pack
from tests.conftest import build_engine
from tests.helpers.oracle import assert_one_answer, greedy
assert kernels() is None
for milestone in ("m1_single", "m3_paged"):
    engine = build_engine(milestone, "tiny-llama")
    linear = engine.core.runner.model.lm_head
    assert not isinstance(linear.packed, pack.CompiledProduct)
    for output in engine.generate([[7], list(range(40, 57))], greedy(8)):
        assert_one_answer("tiny-llama", output, 8)
"""
    run_python("-c", program, CC="no-such-compiler", LLM_LADDER_CACHE=str(tmp_path))


@pytest.mark.parametrize("compiler", ["false", "true", "no-such-compiler", " ", "'"])
def test_a_compiler_that_fails_is_none(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler may refuse a flag, write no file, or not exist."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path))
    assert build.load_library.__wrapped__() is None
    assert not list(tmp_path.glob("*.so"))


def test_the_next_compiler_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compiler may fail, for example because it cannot use torch's OpenMP."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ("false", "gcc"))
    monkeypatch.setattr(build, "FLAGS", [*build.LANGUAGE, "-O0"])  # faster to compile
    assert isinstance(build.load_library.__wrapped__(), ctypes.CDLL)


# What each kind of CPU selects in the sources. This machine may be unable to run it.
KINDS = [f"-march=x86-64{v}" for v in ("-v4", "-v3", "")] if platform.machine() == "x86_64" else []


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("kind", KINDS or [f"-march={MARCH}"])
def test_c_compiles_without_a_warning_for_each_kind_of_cpu(kind: str, tmp_path: Path) -> None:
    sources = [str(source) for source in sorted(Path(build.__file__).parent.glob("*.c"))]
    done = subprocess.run(
        [*build.compilers()[0], *build.LANGUAGE, "-O0", kind, "-Wall", "-Wextra", "-c", *sources],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
