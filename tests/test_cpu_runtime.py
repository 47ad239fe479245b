"""Advice to the system about memory: it may make things faster, and must never change a number."""

from __future__ import annotations

import mmap

import pytest
import torch

from common.cpu_runtime import in_huge_pages


@pytest.mark.parametrize("count", [0, 1, 1023, 3 * (1 << 20) + 5])
def test_huge_pages_are_only_advice(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(count, dtype=torch.float32)
    expected = numbers.clone()
    assert in_huge_pages(numbers) is numbers
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)  # not Linux
    assert in_huge_pages(numbers) is numbers
    assert torch.equal(numbers, expected)


def test_a_view_within_a_tensor_is_advised_within_its_bounds() -> None:
    whole = torch.ones(5 << 20)
    inside = in_huge_pages(whole[1001:-1001])
    inside.fill_(2)
    assert whole.sum().item() == 2 * whole.numel() - 2002


def test_memory_of_another_device_is_left_alone() -> None:
    elsewhere = torch.empty(1 << 20, device="meta")
    assert in_huge_pages(elsewhere) is elsewhere
