"""Cases for `kernel_driver.c`: inputs, and the bits that the kernels of this machine compute."""

from __future__ import annotations

import struct
from typing import Any

import torch

from common.fast import cpu_attention
from common.fast.cpu_kernels import BatchLayout, Heads, Kernels, Layer, Layers, Linear
from milestones.chain import load
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests.helpers.stored_weights import random_weight

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

    def put_batch(self, keys: torch.Tensor, values: torch.Tensor, layout: BatchLayout) -> None:
        """keys, values: [kv_heads, pages, page_size, dim]."""
        self.put_memory(keys, values)
        self.put(layout.pages, *layout.kept)

    def put_memory(self, keys: torch.Tensor, values: torch.Tensor) -> None:
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
        self.put_batch(keys, values, layout)
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
