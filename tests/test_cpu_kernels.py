"""The kernels in C: compiled here, compared with torch, and the same bits in any batch (I2).

There is nothing to test where no compiler is; that everything works without one is tested too.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from common.cpu_kernels import Kernels, Linear, build, kernels
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def compiled() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("no C compiler")
    return found


def test_this_machine_has_the_kernels() -> None:
    """They may be missing only where a compiler is."""
    assert (kernels() is None) == (build._compiler() is None)


SIZES = [(1, 1), (7, 3), (16, 16), (64, 48), (65, 33), (576, 960), (130, 1001)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 13, 48, 49, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer(
    compiled: Kernels, inputs: int, outputs: int, rows: int, biased: bool
) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    packed = compiled.pack(weight)
    linear = Linear.of(packed, bias, outputs)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    ours = compiled.linear(x, linear)
    torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-4)
    alone = torch.cat([compiled.linear(row, linear) for row in x.split(1)])
    assert torch.equal(ours, alone), "a row depends on its neighbours (I2)"


def test_any_number_of_threads_computes_the_same_bits(compiled: Kernels) -> None:
    weight, x = torch.randn(100, 50), torch.randn(9, 50)
    linear = Linear.of(packed := compiled.pack(weight), None, 100)
    assert packed.shape[1] == 50
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(compiled.linear(x, linear))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_without_a_compiler_everything_still_runs(tmp_path: Path) -> None:
    """Torch's packed products and attention, and the reference's answer."""
    program = """
import sys
from common.cpu_kernels import kernels
from common.model_passes import pack
from tests.conftest import build_engine
from tests.oracle import assert_one_answer, greedy
assert kernels() is None
for milestone in ("m1_single", "m3_paged"):
    engine = build_engine(milestone, "tiny-llama")
    linear = engine.runner.model.lm_head
    assert not isinstance(linear.packed, pack.CompiledProduct)
    for output in engine.generate([[7], list(range(40, 57))], greedy(8)):
        assert_one_answer("tiny-llama", output, 8)
print("all right")
"""
    environment = {"CC": "no-such-compiler", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert "all right" in done.stdout, done.stderr


@pytest.mark.parametrize("compiler", ["false", "true"])
def test_a_compiler_that_fails_is_none(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may refuse a flag, or write nothing."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path))
    assert build.load_library.__wrapped__() is None
    assert not list(tmp_path.glob("*.so"))


def test_a_library_is_compiled_once(
    compiled: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path))
    assert isinstance(build.load_library.__wrapped__(), ctypes.CDLL)
    (library,) = tmp_path.iterdir()

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", fail)
    assert isinstance(build.load_library.__wrapped__(), ctypes.CDLL)
    assert list(tmp_path.iterdir()) == [library]


def test_c_compiles_without_a_warning(compiled: Kernels) -> None:
    compiler = build._compiler()
    assert compiler is not None
    for source in sorted(Path(build.__file__).parent.glob("*.c")):
        done = subprocess.run(
            [*compiler, *build.FLAGS, "-Wall", "-Wextra", "-fsyntax-only", str(source)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
