"""The kernels on an ARM CPU that QEMU emulates: the same bits as here, for registers of one width.

Kernels for four lanes have no fused product on either CPU, and all their operations are rounded as
IEEE 754 says. So the kernels that are compiled for four lanes here tell which bits an ARM CPU
computes. The driver is a program in C, because there is no torch on the emulated CPU.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from common.fast.cpu_kernels import build
from common.fast.stored.formats import FORMATS
from tests.conftest import ROOT
from tests.helpers.kernel_cases import END, Cases
from tests.helpers.kernel_widths import WIDTHS, compiled_for

pytestmark = pytest.mark.cpu

DRIVER = ROOT / "tests" / "helpers" / "kernel_driver.c"
ALL_AGREE = r"[1-9]\d\d+ results compared, 0 have other bits\n"


@pytest.fixture(scope="session")
def cases() -> bytes:
    """All formats, all numbers of rows in a tile, and the edges of panels, pages and parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Cases(compiled_for("4-lanes"))
        for name in FORMATS:
            made.rows(name)
            for rows in (1, 2, 3, 4, 13):
                made.linear([name], [21], 768, rows)
        for rows in (1, 5, 7, 12, 49, 100):
            made.linear(["F32"], [9], 77, rows)
        made.linear(["Q4_K", "BF16", "Q6_K"], [40, 7, 33], 256, 5)
        for heads, dim in (((4, 2), 20), ((9, 3), 31), ((7, 1), 16), ((4, 4), 64)):
            made.attention([1, 255, 256, 257, 513, 40], [1, 1, 1, 1, 1, 30], heads, dim)
        made.layers(["F32", "F32", "F32"], [1, 30, 300], normed=False)
        made.layers(["Q4_1", "Q8_0", "F16"], [257, 9, 4, 5, 70], normed=True)
        made.low_rank(64, 70, 8)
        made.put(END)
    return bytes(made.content)


def compile_driver(compiler: list[str], flags: list[str], folder: Path) -> Path:
    """Compile the driver with the kernels; return the program."""
    sources = [str(file) for file in sorted(build.HERE.glob("*.c")) if file.name != "layer.c"]
    program = folder / "driver"
    command = [*compiler, *build.LANGUAGE, *flags, "-Wall", f"-I{build.HERE}", str(DRIVER)]
    done = subprocess.run(
        [*command, *sources, "-lm", "-o", program], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return program


def run(command: list[str | Path], cases: bytes) -> str:
    done = subprocess.run(command, input=cases, capture_output=True)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == (" 0 have other bits" not in said), said
    return said


@pytest.mark.thorough("compiles all kernels for the test's driver")
def test_the_driver_finds_other_bits(cases: bytes, tmp_path: Path) -> None:
    """The driver on this CPU agrees, until one bit of the last result is another."""
    program = compile_driver(build.compilers()[0], WIDTHS["4-lanes"], tmp_path)
    assert re.fullmatch(ALL_AGREE, run([program], cases))
    wrong = bytearray(cases)
    wrong[-9] ^= 1 << 6  # the number that ends the cases has eight bytes
    assert run([program], bytes(wrong)).endswith(" 2 have other bits\n")


@pytest.mark.extra("arm")
@pytest.mark.thorough("cross-compiles all kernels")
def test_an_arm_cpu_computes_the_same_bits(cases: bytes, tmp_path: Path) -> None:
    """I2 on ARM, too: each row and each token is computed alone and among others."""
    program = compile_driver(["aarch64-linux-gnu-gcc"], ["-O1"], tmp_path)
    emulator: list[str | Path] = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
    assert re.fullmatch(ALL_AGREE, run([*emulator, program], cases))
