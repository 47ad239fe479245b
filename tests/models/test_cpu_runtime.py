"""Advice to the system about memory may make an engine faster, and must never change a number."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from common.fast.cpu_runtime import in_huge_pages


@pytest.mark.parametrize("count", [0, 1, 1023, 3 * (1 << 20) + 5])
def test_huge_pages_are_only_advice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(count, dtype=torch.float32)
    expected = numbers.clone()
    assert in_huge_pages(numbers) is numbers
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)  # not Linux
    assert in_huge_pages(numbers) is numbers
    assert torch.equal(numbers, expected)


def test_a_view_within_a_tensor_is_advised_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The advice begins at the first whole page of a view and ends at the view's last byte."""
    whole, advised = torch.ones(5 << 20), []

    class Library:
        @staticmethod
        def madvise(start: ctypes.c_void_p, size: ctypes.c_size_t, _advice: int) -> None:
            advised.append((start.value or 0, size.value))

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Library)
    inside = in_huge_pages(whole[1001:-1001])
    inside.fill_(2)
    assert whole.sum().item() == 2 * whole.numel() - 2002
    ((start, size),) = advised
    assert start % mmap.PAGESIZE == 0
    assert 0 <= start - inside.data_ptr() < mmap.PAGESIZE
    assert start + size == inside.data_ptr() + inside.nbytes


def test_memory_of_another_device_is_left_alone() -> None:
    elsewhere = torch.empty(1 << 20, device="meta")
    assert in_huge_pages(elsewhere) is elsewhere
