"""kv_quant.1: numbers become lines of 8 bits, and lines become numbers."""

from __future__ import annotations

import pytest
import torch

from milestones.electives.kv_quant.formats import pack_fp8, unpack_as
from milestones.electives.kv_quant.packing import SCALE_BYTES, pack, unpack


def numbers(shape: tuple[int, ...] = (6, 2, 8), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def scale_of(lines: torch.Tensor) -> torch.Tensor:
    return lines[..., :SCALE_BYTES].contiguous().view(torch.float32)


def test_a_line_is_a_scale_and_a_byte_for_each_number() -> None:
    lines = pack(torch.tensor([[127.0, -127.0, 0.0, 64.0], [2.54, 0.0, -1.26, 0.02]]))
    assert (lines.dtype, lines.shape) == (torch.int8, (2, SCALE_BYTES + 4))
    assert lines[:, SCALE_BYTES:].tolist() == [[127, -127, 0, 64], [127, 0, -63, 1]], (
        "each number is the nearest multiple of the scale"
    )
    assert scale_of(lines).flatten().tolist() == pytest.approx([1.0, 0.02])


def test_a_number_is_off_by_at_most_half_a_scale() -> None:
    x = numbers((50, 3, 16))
    lines = pack(x)
    off = (unpack(lines) - x).abs() / scale_of(lines)
    assert float(off.max()) <= 0.501, "half a scale: round to the nearest, do not cut off"
    assert float(off.max()) > 0.4, "the largest number of a line must use all 127 steps"


def test_halves_go_to_even_numbers() -> None:
    """Every backend must write the same bits, so all of them round as torch does."""
    line = pack(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]))
    assert line[SCALE_BYTES:].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_each_token_and_head_has_a_scale() -> None:
    """I2: the line of a token is the same in every chunk."""
    x = numbers()
    x[3] *= 100
    whole = pack(x)
    for token in range(len(x)):
        assert torch.equal(pack(x[token : token + 1])[0], whole[token]), (
            "I2: the line of a token must not depend on the tokens that are packed with it"
        )
    for head in range(x.shape[1]):
        assert torch.equal(pack(x[:, head]), whole[:, head]), "a head has a scale of its own"


def test_zeros_stay_zeros() -> None:
    x = numbers()
    x[2, 1] = 0
    found = unpack(pack(x))
    assert found.isfinite().all(), "0 / 0 is NaN: a line of zeros has the scale 0"
    assert found[2, 1].tolist() == [0.0] * 8 and found[2, 0].abs().sum() > 0


def test_tiny_numbers_are_in_range() -> None:
    """A 127th of the smallest floats is no float, or a rounded one."""
    x = torch.tensor([[1e-44, -1e-45, 0, 3e-45], [2.6e-43, -2.6e-43, 3e-45, 0.0]])
    found = unpack(pack(x))
    assert (found - x).abs().max() < 2e-43
    assert (found * x >= 0).all(), "a number that leaves the range of int8 comes back negative"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_look_finite(bad: float) -> None:
    """I4: the engine ends a request with NaN. It can do so only if it sees the NaN."""
    x = numbers()
    x[4, 0, 3] = bad
    found = unpack(pack(x))
    assert not found[4, 0].isfinite().all(), "the line of a number that is not finite"
    assert found[4, 1].isfinite().all() and found[:4].isfinite().all(), "only this line"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_float32(dtype: torch.dtype) -> None:
    """In float16, the scale itself would be off by up to a part in 2,048."""
    x = numbers().to(dtype)
    lines = pack(x)
    assert torch.equal(lines, pack(x.float())), "convert before the scale is computed"
    assert unpack(lines).dtype == torch.float32
    assert unpack(lines, dtype).dtype == dtype


def test_lines_of_a_gather_are_unpacked() -> None:
    x = numbers((4, 2, 8))
    lines = pack(x)
    chosen = unpack(lines[[3, 0, 0]])
    assert torch.equal(chosen, unpack(lines)[[3, 0, 0]])


def test_a_line_of_fp8_is_a_scale_and_a_byte_for_each_number() -> None:
    lines = pack_fp8(torch.tensor([[448.0, -448.0, 0.0, 17.0], [0.875, -0.03125, 0.0, 0.5]]))
    assert (lines.dtype, lines.shape) == (torch.uint8, (2, SCALE_BYTES + 4))
    assert scale_of(lines).flatten().tolist() == [1.0, 0.875 / 448]
    assert unpack_as(lines).tolist() == [[448.0, -448.0, 0.0, 16.0], [0.875, -0.03125, 0.0, 0.5]], (
        "each number is the nearest e4m3 number times the scale, and a half goes to the even one"
    )


def test_a_number_in_fp8_is_off_by_at_most_a_16th() -> None:
    x = numbers((50, 3, 16))
    lines = pack_fp8(x)
    off = (unpack_as(lines) - x).abs()
    most = torch.maximum(x.abs() / 16, scale_of(lines) / 1024)
    assert (off <= most * 1.001).all(), "round to the nearest e4m3 number"
    assert scale_of(lines).flatten() == pytest.approx((x.abs().amax(-1) / 448).flatten())
    assert torch.equal(pack_fp8(x[7:8])[0], lines[7]), "I2: a line depends on its own token"
    assert torch.equal(pack_fp8(x.bfloat16()), pack_fp8(x.bfloat16().float())), "float32 scales"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_unusual_numbers_in_fp8(bad: float) -> None:
    """Zeros, numbers with a scale so small that it is rounded, and what is not finite (I4)."""
    x = numbers()
    x[4, 0, 3], x[2, 1], x[3, 0] = bad, 0.0, 0.0
    x[3, 0, :3] = torch.tensor([9.6e-43, -9.6e-43, 1e-45])
    found = unpack_as(pack_fp8(x))
    assert not found[4, 0].isfinite().all(), "the line of a number that is not finite"
    assert found[4, 1].isfinite().all() and found[:4].isfinite().all(), "only this line"
    assert found[2, 1].tolist() == [0.0] * 8
