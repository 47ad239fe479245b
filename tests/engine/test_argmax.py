"""`argmax` by blocks returns the same index as torch's, which compares one number at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.sampling.argmax import argmax

WIDTHS = [1, 31, 256, 320, 512, 49_152 // 8, 50_257 // 7]


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(0, 4),
    width=st.sampled_from(WIDTHS),
    values=st.sampled_from([2, 3, 1000]),  # with few values, many numbers are equal
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_first_of_equals(
    seed: int, batch: int, width: int, values: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(values, (batch, width), generator=generator).to(dtype) - 5
    expected = torch.tensor([row.index(max(row)) for row in x.tolist()], dtype=torch.int64)
    assert torch.equal(argmax(x), expected)


@pytest.mark.parametrize("width", [50, 512])
def test_what_is_no_number_and_what_is_infinite(width: int) -> None:
    x = torch.zeros(4, width)
    x[0] = -torch.inf
    x[1, 30:] = -torch.inf
    x[1, :30] = -1e38
    x[2, 40:] = torch.inf
    x[3, 20], x[3, 45], x[3, 30] = torch.nan, torch.nan, torch.inf
    assert argmax(x).tolist() == x.argmax(dim=-1).tolist() == [0, 0, 40, 20]


def test_rows_of_a_wider_matrix() -> None:
    wide = torch.randn(5, 1024)
    for x in (wide[:, 100:612], wide[::2], wide.t()[:512].t()):
        assert torch.equal(argmax(x), x.argmax(dim=-1))
