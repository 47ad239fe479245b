"""`LADDER_CPU` makes this machine a narrower one, for our kernels, for torch and for children."""

from __future__ import annotations

import os
import platform

import pytest

from common import cpu
from tests.helpers.process import run_python

pytestmark = pytest.mark.cpu

PROGRAM = """
import torch  # a program may import torch first
import common
from common.fast.cpu_kernels import build
print(torch.backends.cpu.get_cpu_capability(), build.FLAGS[-1])
"""
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about kinds of x86-64 CPUs")


@pytest.mark.thorough("processes that import torch")
@ON_X86
@pytest.mark.parametrize(
    ("kind", "said"),
    [("x86-64", "DEFAULT -march=x86-64\n"), ("x86-64-v3", "AVX2 -march=x86-64-v3\n")],
)
def test_torch_and_our_kernels_are_made_narrower(kind: str, said: str) -> None:
    if cpu.NEEDED.get(kind, set()) - cpu.features():
        pytest.skip("this CPU is narrower")
    unset = dict.fromkeys(cpu.KINDS[kind])
    assert run_python("-c", PROGRAM, **unset, **{cpu.VARIABLE: kind}) == said


@ON_X86
def test_the_kernels_of_this_run_are_as_narrow_as_it_asks() -> None:
    """The variables of torch are set in the environment, which children inherit."""
    kind = os.environ.get(cpu.VARIABLE)
    assert (kind or "native") == cpu.MARCH
    assert all(os.environ[key] == value for key, value in cpu.KINDS.get(cpu.MARCH, {}).items())


def test_without_the_variable_nothing_is_narrower() -> None:
    for environment in ({}, {cpu.VARIABLE: ""}):
        before = dict(environment)
        assert cpu.narrow(environment) == "native"
        assert environment == before


def test_a_kind_that_this_machine_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"must be one of x86-64-v3, x86-64, got 'avx2'"):
        cpu.narrow({cpu.VARIABLE: "avx2"})
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="needs an x86-64 CPU, this one is aarch64"):
        cpu.narrow({cpu.VARIABLE: "x86-64"})
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "features", lambda: {"fma", "bmi2", "sse2"})
    environment = {cpu.VARIABLE: "x86-64-v3"}
    with pytest.raises(ValueError, match="this CPU has no avx2, f16c"):
        cpu.narrow(environment)
    assert list(environment) == [cpu.VARIABLE]
