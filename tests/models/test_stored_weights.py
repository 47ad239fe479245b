"""Weights in the precision of the checkpoint: the same bits as in float32, in each format."""

from __future__ import annotations

import pytest
import torch

from common import EngineConfig
from common.fast.cpu_kernels import Kernels, Linear
from common.fast.passes import pack
from common.fast.stored.formats import FORMATS, pack_quanta, unpack_quanta
from common.fast.stored.gguf import BLOCKS
from common.fast.stored.modules import dequantize, keep, keep_narrow, stored_of, with_stored
from common.fast.stored.weight import StoredWeight
from tests.helpers.stored_weights import QUANTIZED, dequantized, random_blocks, random_weight

pytestmark = pytest.mark.cpu


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_weight_of_a_gguf_file_has_the_bits_of_its_own_package(kind: str) -> None:
    """Two blocks or more in each row, random in every byte: order, signs and factors all count."""
    rows, format = random_blocks(kind, 37, 768), FORMATS[kind]
    quanta = BLOCKS[kind](rows.reshape(37, 768 // format.block, -1))
    ours = torch.from_numpy(quanta.dequantize(format))
    assert same_bits(ours, dequantized(kind, rows))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("panel_size", [8, 16, 32])
@pytest.mark.parametrize("out", [1, 32, 37])
def test_packing_loses_nothing(kind: str, panel_size: int, out: int) -> None:
    rows, format = random_blocks(kind, out, 512), FORMATS[kind]
    quanta = BLOCKS[kind](rows.reshape(out, 512 // format.block, -1))
    packed = pack_quanta(quanta, format, panel_size)
    again = unpack_quanta(packed, format, out, 512)
    assert same_bits(*(torch.from_numpy(q.dequantize(format)) for q in (quanta, again)))
    assert len(packed) == -(-out // panel_size), "more panels than the outputs need"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out", "inputs"), [(70, 512), (33, 256), (33, 77), (1, 1)])
def test_a_product_has_the_bits_of_float32(
    compiled: Kernels, name: str, out: int, inputs: int
) -> None:
    if inputs % FORMATS[name].block and not FORMATS[name].is_float:
        inputs = FORMATS[name].block * 3  # a row of this format has whole blocks
    stored = random_weight(name, out, inputs, compiled.panel_size)
    weight = stored.dequantize()
    compiled.require_layout(stored)
    plain = StoredWeight.of_floats(weight, compiled.panel_size)
    for rows in (1, 2, 3, 4, 5, 16, 49, 100):
        x = torch.randn(rows, inputs)
        ours = compiled.linear(x, Linear.of([stored], None))
        assert same_bits(ours, compiled.linear(x, Linear.of([plain], None))), f"{rows} rows"
        largest = float(ours.abs().max())
        torch.testing.assert_close(
            ours.double(), x.double() @ weight.double().T, atol=1e-4 * largest, rtol=1e-4
        )


@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding_has_the_bits_of_float32(compiled: Kernels, name: str) -> None:
    stored = random_weight(name, 70, 512, compiled.panel_size)
    ids = torch.randint(0, 70, (3, 7))
    assert same_bits(compiled.take_rows(ids, stored), stored.dequantize()[ids])
    assert compiled.take_rows(ids[:0], stored).shape == (0, 7, 512)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_numbers_of_16_bits_are_exact(compiled: Kernels, dtype: torch.dtype) -> None:
    """Also the subnormal ones, and -0."""
    numbers = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    numbers = torch.where(numbers.isfinite(), numbers, 0).view(256, 256)
    stored = StoredWeight.of_floats(numbers, compiled.panel_size)
    assert same_bits(stored.dequantize(), numbers.float())
    assert same_bits(compiled.take_rows(torch.arange(256), stored), numbers.float())


def test_a_product_of_weights_in_different_formats(compiled: Kernels) -> None:
    """Q, k and v of one layer may have three formats; none has a whole number of panels."""
    names, outputs = ("Q4_K", "BF16", "Q6_K"), (40, 7, 33)
    size, x, bias = compiled.panel_size, torch.randn(5, 256), torch.randn(80)
    weights = [random_weight(n, out, 256, size) for n, out in zip(names, outputs, strict=True)]
    plain = torch.cat([weight.dequantize() for weight in weights])
    ours = compiled.linear(x, Linear.of(weights, bias))
    theirs = compiled.linear(x, Linear.of([StoredWeight.of_floats(plain, size)], bias))
    assert same_bits(ours, theirs)


def test_what_c_would_misread_is_refused(compiled: Kernels) -> None:
    size = compiled.panel_size
    stored = random_weight("Q4_1", 70, 512, size)
    for ids in (torch.tensor([70]), torch.tensor([-1])):
        with pytest.raises(IndexError, match=r"\[0, 70\)"):
            compiled.take_rows(ids, stored)
    with pytest.raises(TypeError, match="int64"):
        compiled.take_rows(torch.tensor([1.0]), stored)
    with pytest.raises(ValueError, match="multiple of 256"):
        StoredWeight(FORMATS["Q4_K"], 70, 512 + 32, stored.data)
    with pytest.raises(ValueError, match="table of bytes"):
        StoredWeight(FORMATS["Q4_1"], 70, 512, stored.data.float())
    with pytest.raises(ValueError, match="needs .* panels"):
        compiled.require_layout(StoredWeight(FORMATS["Q4_0"], 70, 512, stored.data))
    with pytest.raises(ValueError, match="same inputs"):
        Linear.of([stored, random_weight("Q4_1", 70, 256, size)], None)
    with pytest.raises(ValueError, match="bias must have 70"):
        Linear.of([stored], torch.zeros(71))


def test_a_stored_weight_is_not_a_number_to_other_code() -> None:
    linear = torch.nn.Linear(512, 70, bias=False)
    keep(linear, random_weight("Q4_1", 70, 512, 32))
    assert linear.weight.shape == (70, 512) and linear.weight.untyped_storage().nbytes() == 4
    assert bool(linear(torch.ones(1, 512)).isnan().all())
    dequantize(linear)
    assert bool(linear(torch.ones(1, 512)).isfinite().all()) and not stored_of(linear)


def test_only_numbers_that_fit_become_narrow() -> None:
    layers = [torch.nn.Linear(64, 40) for _ in range(4)]
    model = torch.nn.ModuleList(layers)
    with torch.no_grad():
        layers[1].weight.copy_(layers[1].weight.bfloat16())
        layers[2].weight.copy_(layers[2].weight.half())
        layers[3].weight.copy_(layers[3].weight.bfloat16())
        layers[3].weight[30, 3] = 1 + 2**-20
    before = [layer.weight.detach().clone() for layer in layers]
    assert keep_narrow(model, 32) == 2
    formats = [[weight.format.name for weight in stored_of(layer)] for layer in layers]
    assert formats == [[], ["BF16"], ["F16"], []]
    dequantize(model)
    assert all(torch.equal(a.weight, b) for a, b in zip(layers, before, strict=True))
    assert not list(with_stored(model))


def test_a_kernel_that_computes_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if (found := pack.kernels()) is None:
        pytest.skip("no C compiler")
    linear = torch.nn.Linear(512, 70, bias=False)
    keep(linear, random_weight("Q4_1", 70, 512, found.panel_size))
    right = pack.CompiledProduct.__call__

    def off_by_a_bit(self: pack.CompiledProduct, x: torch.Tensor) -> torch.Tensor:
        return right(self, x) * (1 + 2**-22 * (self.weights[0].format.name == "Q4_1"))

    monkeypatch.setattr(pack.CompiledProduct, "__call__", off_by_a_bit)
    with pytest.raises(pack.StoredProductError, match="Q4_1"):
        pack.pack_linears(torch.nn.Sequential(linear))


def test_a_quantization_that_is_none() -> None:
    with pytest.raises(ValueError, match="quantization must be one of"):
        EngineConfig(quantization="int4")  # type: ignore[arg-type]
