"""The kernels in C for several widths of registers and on several threads, and the attention that
kernels must equal."""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from common.fast.cpu_kernels import Kernels, bind, build, kernels
from milestones.chain import load
from tests.helpers.deselected import thorough_except

# GCC needs minutes to optimize vectors that are wider than the registers of this CPU. With -Og it
# needs seconds, and the libraries are kept in the cache folder like those of the engines.
PORTABLE = ["-march=x86-64"] if platform.machine() == "x86_64" else []  # without intrinsics
WIDTHS = {
    "this-cpu": [],
    "16-lanes": ["-Og", "-DLANES=16", *PORTABLE],
    "8-lanes": ["-Og", "-DLANES=8"],
    "4-lanes": ["-Og", "-DLANES=4"],
}
WIDER = "this CPU's kernels and those of one other width run the same code"


@pytest.fixture(scope="session", params=thorough_except(("this-cpu", "4-lanes"), WIDTHS, WIDER))
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """The kernels that engines use on this CPU, and those for registers of other widths."""
    return compiled_for(request.param)


@pytest.fixture(scope="session")
def attention(milestone: str) -> ModuleType:
    """The file of an engine with attention in plain torch."""
    return load(milestone, "attention")


def compiled_for(width: str) -> Kernels:
    """Return the kernels for registers of this width."""
    library = build.load_library(*WIDTHS[width])
    if kernels() is None:
        pytest.skip("no C compiler")
    assert library is not None, "the compiler compiles the kernels of this CPU and no others"
    return bind(library)


def on_threads(compute: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return what a function computes on one thread of torch, on two, and on three."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    return results
