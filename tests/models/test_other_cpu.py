"""The kernels on an ARM CPU that QEMU emulates: the same bits as here, for registers of one width.

Kernels for four lanes have no fused product on either CPU, and all their operations are rounded as
IEEE 754 says. So the kernels that are compiled for four lanes here tell which bits an ARM CPU
computes. The driver is a program in C, because there is no torch on the emulated CPU.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from common.fast import cpu_attention
from common.fast.cpu_kernels import Heads, Kernels, Layer, Layers, Linear, build
from common.fast.stored.formats import FORMATS
from milestones.chain import load
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests.conftest import ROOT
from tests.helpers.stored_weights import random_weight
from tests.models.conftest import WIDTHS, compiled_for

pytestmark = pytest.mark.cpu

DRIVER = ROOT / "tests" / "helpers" / "kernel_driver.c"
ALL_AGREE = r"[1-9]\d\d+ results compared, 0 have other bits\n"
END, LINEAR, ROWS, ATTENTION, LAYERS, LOW_RANK = range(6)  # as in the driver


class Cases:
    """The input of the driver. The methods compute with the kernels of this machine."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.content = bytearray()
        self.put(kernels.panel_size)

    def put(self, *values: Any) -> None:
        """Add integers, and the bytes of tensors, of floats and of None after their number."""
        for value in values:
            if isinstance(value, int):
                self.content += struct.pack("q", value)
                continue
            x = torch.tensor([value]) if isinstance(value, float) else value
            kept = b"" if x is None else x.contiguous().view(torch.uint8).numpy().tobytes()
            self.content += struct.pack("q", len(kept)) + kept

    def put_linear(self, linear: Linear) -> None:
        weights, bias = linear.kept
        self.put(linear.in_features, linear.out, linear.count, bias)
        for weight in weights:
            self.put(weight.out, weight.format.number, weight.data)

    def put_memory(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [kv_heads, pages, page_size, dim]."""
        heads, pages, size, dim = keys.shape
        self.put(heads, pages * size, size, dim, keys, values)

    def linear(self, names: list[str], outputs: list[int], inputs: int, rows: int) -> None:
        linear = self.product(names, outputs, inputs, biased=rows % 2 == 1)
        x, add = torch.randn(rows, inputs), torch.randn(rows, linear.out) if rows % 3 else None
        self.put(LINEAR)
        self.put_linear(linear)
        self.put(rows, x, add, self.kernels.linear(x, linear, add))

    def product(self, names: list[str], outputs: list[int], inputs: int, biased: bool) -> Linear:
        size, pairs = self.kernels.panel_size, zip(names, outputs, strict=False)
        weights = [random_weight(name, out, inputs, size) for name, out in pairs]
        return Linear.of(weights, torch.randn(sum(outputs)) if biased else None)

    def rows(self, name: str) -> None:
        weight, ids = random_weight(name, 37, 256, self.kernels.panel_size), torch.randperm(37)
        self.put(ROWS, 37, weight.format.number, weight.data, 256, 37, ids)
        self.put(self.kernels.take_rows(ids, weight))

    def attention(
        self, contexts: list[int], counts: list[int], heads: tuple[int, int], dim: int
    ) -> None:
        case = PagedCase(load("m3_paged", "attention"), contexts, counts, heads, dim)
        meta, keys, values = case.meta, case.keys, case.values
        layout = cpu_attention.layout_of(meta)
        splits = layout.splits_of(self.kernels.split_size, case.keys.shape[2])
        self.put(ATTENTION)
        self.put_memory(keys, values)
        self.put(layout.pages, *layout.kept)
        self.put(layout.count, heads[0], splits, SCALE, case.key, case.value, case.query)
        self.kernels.store_kv(keys, values, case.key, case.value, layout)
        args = layout, 0, layout.count, SCALE
        self.put(self.kernels.paged_attention(case.query, keys, values, *args))

    def layers(self, formats: list[str], contexts: list[int], normed: bool) -> None:
        """Decode one token of each request through two layers."""
        case = PagedCase(load("m3_paged", "attention"), contexts, [1] * len(contexts), (4, 2), 64)
        meta, rows, hidden, width = case.meta, len(contexts), 256, 512
        layout = cpu_attention.layout_of(meta)
        sizes = ([256, 128, 128], hidden), ([hidden], 256), ([width] * 2, hidden), ([hidden], width)
        layers, memory = [], [(case.keys, case.values), (case.keys.clone(), case.values.clone())]
        self.put(LAYERS, 2, rows, layout.splits_of(self.kernels.split_size, case.keys.shape[2]))
        for kept in memory:
            norms = [torch.randn(n) for n in (hidden, hidden, 64, 64)]
            given = norms if normed else [*norms[:2], None, None]
            linears = [
                self.product(formats, outputs, inputs, biased=normed) for outputs, inputs in sizes
            ]
            pointers = (None if norm is None else norm.data_ptr() for norm in given)
            layers.append(Layer(*pointers, 1e-5, 4, 2, 64, *linears))
            layers[-1].norms, layers[-1].linears = given, linears  # C has only their addresses
            self.put(4, 2, 64, 1e-5, *given)
            for linear in linears:
                self.put_linear(linear)
            self.put_memory(*kept)
        self.put(layout.pages, *layout.kept)
        angles = torch.randn(1, rows, 1, 64)
        cos, sin, x = angles.cos(), angles.sin(), torch.randn(1, rows, hidden)
        self.put(SCALE, cos, sin, x)
        heads = Heads.of(cos, sin, (4, 2, 2))
        self.put(self.kernels.decode_layers(Layers(layers, memory), x, heads, layout, SCALE))

    def low_rank(self, inputs: int, out: int, rank: int) -> None:
        slots, ranks = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([0, rank, rank - 1])
        x, y, a = torch.randn(5, inputs), torch.randn(5, out), torch.randn(3, rank, inputs)
        b = torch.randn(3, rank, out)
        self.put(LOW_RANK, inputs, out, rank, 5, x, y, slots, ranks, a, b)
        self.kernels.add_low_rank(x, y, slots, ranks, a, b)
        self.put(y)


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
