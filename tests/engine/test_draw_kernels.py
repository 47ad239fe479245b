"""The Triton kernels of the sampler, interpreted: they choose the tokens that torch chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import SamplingParams
from common.sampling.choice import choose, kernels_on
from common.sampling.draws import DrawParams, choose_in_torch, scale_and_filter
from tests.exercises.by_hand import request_with
from tests.helpers.deselected import thorough_except

pytest.importorskip("triton", reason="Triton is for Linux")
EDGE = 1e-6  # of the probability: so near to a border, rounding decides
SIZES = (1, 2, 50, 1023, 1024, 1025, 2500)
SLOW = "Triton's interpreter is slow"


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The launchers of the kernels. `tests.conftest` turns Triton's interpreter on."""
    from common.sampling import draw_kernels

    return draw_kernels


def params_of(number: int) -> SamplingParams:
    """Return one of many combinations of parameters."""
    return SamplingParams(
        temperature=(1.0, 0.7, 0.0, 1.8, 1e-4)[number % 5],
        top_k=(0, 0, 40, 1, 7, 10**6)[number % 6],
        top_p=(1.0, 0.9, 1.0, 0.5, 1e-3, 0.999, 1.0)[number % 7],
        min_p=(0.0, 0.0, 0.02, 0.0, 1.0)[number // 5 % 5],
        seed=number,
    )


def cases(count: int, size: int, first: int) -> tuple[torch.Tensor, DrawParams]:
    """Return the logits of `count` rows, and how they draw. Some rows have many equal logits."""
    generator = torch.Generator().manual_seed(first)
    scales = torch.tensor([0.0, 0.5, 3.0, 9.0, 60.0])[torch.arange(count) % 5]
    logits = torch.randn(count, size, generator=generator) * scales[:, None]
    logits[::2] = logits[::2].bfloat16().float()
    logits[torch.rand(count, size, generator=generator) < 0.2] = -math.inf
    logits[:, first % size] = 1.0
    requests = [request_with(params_of(first + i)) for i in range(count)]
    return logits, DrawParams.from_requests(requests, range(count), "cpu")


def assert_same(kernels: ModuleType, logits: torch.Tensor, draws: DrawParams) -> int:
    """Compare all rows. Return how many rows have another token, at the edge of a probability."""
    (ours, valid), (theirs, expected) = (
        kernels.choose(logits, draws),
        choose_in_torch(logits, draws),
    )
    assert torch.equal(valid, expected)
    different = (ours != theirs).nonzero().flatten().tolist()
    probabilities = scale_and_filter(logits, draws)[different].double().softmax(-1)
    for row, p in zip(different, probabilities, strict=True):
        until = p.cumsum(0)[ours[row]]
        u = float(draws.uniforms[row])
        assert until - p[ours[row]] - EDGE <= u <= until + EDGE, f"row {row}: another token"
    return len(different)


@pytest.mark.parametrize("size", thorough_except((2, 1025), SIZES, SLOW))
def test_the_tokens_are_those_of_torch(kernels: ModuleType, size: int) -> None:
    assert assert_same(kernels, *cases(70, size, first=size)) <= 1


@pytest.mark.thorough(SLOW)
def test_ten_thousand_rows(kernels: ModuleType) -> None:
    different = sum(
        assert_same(kernels, *cases(1000, 1500, first)) for first in range(0, 10**4, 10**3)
    )
    assert different <= 10


def test_without_filters_two_kernels_choose(kernels: ModuleType) -> None:
    for size in SIZES:
        logits, draws = cases(20, size, first=0)
        draws.filters = None
        assert assert_same(kernels, logits, draws) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bad", thorough_except((math.nan,), [math.nan, math.inf, -math.inf], SLOW))
def test_an_invalid_row_disturbs_no_other(
    kernels: ModuleType, bad: float, dtype: torch.dtype
) -> None:
    """It gets a token of the vocabulary, because the next step may begin to compute it."""
    logits, draws = cases(7, 1500, first=3)
    logits = logits.to(dtype)
    for filters in (draws.filters, None):
        draws.filters = filters
        expected, _ = kernels.choose(logits, draws)
        broken = logits.clone()
        broken[[0, 5], slice(None) if bad == -math.inf else 1400] = bad
        tokens, valid = kernels.choose(broken, draws)
        assert valid.tolist() == [row not in (0, 5) for row in range(7)]
        assert ((tokens >= 0) & (tokens < 1500)).all()
        assert torch.equal(tokens[valid], expected[valid])


def test_a_row_gets_the_same_token_alone(kernels: ModuleType) -> None:
    """I2: grids and sums of a row do not depend on the other rows."""
    logits, draws = cases(9, 2100, first=8)
    together, _ = kernels.choose(logits, draws)
    for row in range(9):
        requests = [request_with(params_of(8 + row))]
        alone = DrawParams.from_requests(requests, [row], "cpu")
        assert kernels.choose(logits[row : row + 1], alone)[0] == together[row]


class Launches(TorchDispatchMode):
    """Counts operations of torch that would be launches on a GPU."""

    NO_LAUNCH = ("empty", "new_empty", "empty_like", "select", "slice", "view", "unbind", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket.__name__ not in self.NO_LAUNCH:
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def launches(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from triton.runtime.interpreter import GridExecutor

    with Launches() as counted:

        def noted(self: Any, *_args: Any, **_kwargs: Any) -> None:
            counted.names.append(self.fn.__name__)

        monkeypatch.setattr(GridExecutor, "__call__", noted)
        yield counted.names


def test_a_draw_is_two_launches_and_filters_are_fewer_than_twenty(
    kernels: ModuleType, launches: list[str]
) -> None:
    logits, draws = cases(30, 1500, first=0)
    filters, draws.filters = draws.filters, None
    launches.clear()
    kernels.choose(logits, draws)
    assert launches == ["scan_kernel", "draw_kernel"]
    draws.filters = filters
    launches.clear()
    kernels.choose(logits, draws)
    assert len(launches) < 20, launches


def test_kernels_that_fail_are_replaced_by_torch(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are tried once for a GPU and a dtype. A wrong token counts as a failure too."""
    cpu = torch.device("cpu")
    assert kernels_on.__wrapped__(cpu, torch.float32) is kernels and not caplog.text
    kernels_on.cache_clear()
    logits, draws = cases(9, 1500, first=0)
    expected = choose(logits, draws)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for wrong in (lambda *_: 1 / 0, lambda logits, _: (logits[:, 0].long(), logits[:, 0] < 99)):
        monkeypatch.setattr(kernels, "choose", wrong)
        for _ in range(2):
            assert all(map(torch.equal, choose(logits, draws), expected))
        kernels_on.cache_clear()
    assert caplog.text.count("torch samples") == 2
    assert "ZeroDivisionError" in caplog.text or "division by zero" in caplog.text
    assert kernels_on(cpu, torch.float32) is None
    kernels_on.cache_clear()
