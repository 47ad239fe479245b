"""The kernels in C for several widths of registers, and the attention that kernels must equal."""

from __future__ import annotations

from types import ModuleType

import pytest

from common.fast.cpu_kernels import Kernels
from milestones.chain import load
from tests.helpers.kernel_widths import compiled_for

WIDER = pytest.mark.thorough("this CPU's kernels and those of one other width run the same code")


@pytest.fixture(
    scope="session",
    params=[
        "this-cpu",
        pytest.param("16-lanes", marks=WIDER),
        pytest.param("8-lanes", marks=WIDER),
        "4-lanes",
    ],
)
def compiled(request: pytest.FixtureRequest) -> Kernels:
    """The kernels that engines use on this CPU, and those for registers of other widths."""
    return compiled_for(request.param)


@pytest.fixture(scope="session")
def attention(milestone: str) -> ModuleType:
    """The file of an engine with attention in plain torch."""
    return load(milestone, "attention")
