"""m3.6: paged decode in Triton. `kernels.decode_kernel`, run by Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import mmap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from triton.runtime.errors import InterpreterError

from m3_paged import attention, kernels, triton_ops
from milestones.lab.instruments.paged_case import OUT_OF_RANGE, SCALE, PagedCase

MARK = 12345.0
FAR = 1_200_000_000  # numbers from one KV head to the next, as in the pool of a large GPU
OUTPUTS = {"partial": 5, "partial_lse": 6}  # the kernel's outputs: argument name and index


class Guarded:
    """Launches a kernel with spare memory after its outputs, and notes stores into this memory."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.beyond: list[str] = []  # outputs with a store past their end

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: int) -> None:
        given, guards = [*arguments], {}
        for name, place in OUTPUTS.items():
            out = arguments[place]
            behind = 2 * constants["ROWS"] * constants["BLOCK_V"] * out.shape[2]
            memory = out.new_full((out.numel() + behind,), MARK)
            given[place] = memory[: out.numel()].view(out.shape)
            guards[name] = memory[out.numel() :]
        self.kernel[grid](*given, **constants)
        for name, place in OUTPUTS.items():
            arguments[place].copy_(given[place])
            if not (guards[name] == MARK).all():
                self.beyond.append(name)


class Decode:
    """A batch of decodes on memory that is NaN in every slot where no token was written.

    With three query heads of a KV head, the tile has a row that is no head.
    """

    def __init__(
        self, *contexts: int, heads: tuple[int, int] = (6, 2), dim: int = 32, page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        case = PagedCase(attention, [*contexts], [1] * len(contexts), heads, dim, page_size, dtype)
        attention.store_kv(case.keys, case.values, case.key, case.value, case.meta)
        self.contexts, self.tolerance = contexts, case.tolerance
        self.query, self.keys, self.values = case.query, case.keys, case.values
        self.meta = case.meta
        # Behind the pages of a row, the table names page 0, which is all NaN. A kernel that reads
        # too far gets NaN and does not crash. For the same reason, the table itself is part of a
        # larger one.
        rows, width = self.meta.page_table.shape
        table = torch.zeros(rows + 1, width + 600, dtype=torch.int32)
        table[:rows, :width] = torch.where(
            self.meta.page_table == OUT_OF_RANGE, 0, self.meta.page_table
        )
        self.meta.page_table = table[:rows, :width]

    def expected(self) -> torch.Tensor:
        """Return the result of the torch version, in float64."""
        query, keys, values = (x.double() for x in (self.query, self.keys, self.values))
        return attention.paged_decode(query, keys, values, self.meta, SCALE)

    def got(self) -> torch.Tensor:
        """Return the result of the kernel through its launcher. Unwrap the interpreter's errors."""
        guarded = Guarded(kernels.decode_kernel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "decode_kernel", guarded)
            try:
                got = triton_ops.paged_decode(self.query, self.keys, self.values, self.meta, SCALE)
            except InterpreterError as error:
                raise (error.__cause__ or error) from None
        assert guarded.beyond == [], (
            f"the kernel stored beyond the end of {guarded.beyond}. A store needs a mask, like a "
            "load: the tile may have more rows than heads, and its blocks may be wider than "
            "VALUE_DIM"
        )
        return got

    def check(self) -> None:
        """Compare each head of each request with the torch version."""
        got, expected = self.got(), self.expected()
        for row, context in enumerate(self.contexts):
            for head in range(expected.shape[1]):
                ours, theirs = got[row, head].double(), expected[row, head]
                where = f"request {row} of contexts {self.contexts}, query head {head}"
                assert not ours.isnan().any(), (
                    f"{where}: the result is NaN. Only the {context} slots of its context are "
                    "written: slots after them must not even be loaded (0 times NaN is NaN)"
                )
                error = float((ours - theirs).norm() / theirs.norm())
                assert error < self.tolerance, (
                    f"I1: {where}: relative error {error:.1e} against the torch version in float64"
                )


def far_apart(*memories: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of [3, slots, dim] in which a KV head begins `FAR` numbers after the last one.

    They are parts of one mapping of 10 GB. Only the pages of the copies can be written, and take
    memory. What 32 bits make of an address is in the mapping too, as zeros.
    """
    below, room = 2**32 - 2 * FAR, 2**20  # in 32 bits, 2 * FAR becomes -below
    size = 2 * (below + 2 * FAR + room)  # bytes of float16
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mapping cannot be written
        everything = torch.frombuffer(mapping, dtype=torch.float16)
    copies = []
    for i, memory in enumerate(memories):
        strides, begin = (FAR, *memory[0].stride()), below + i * room // 2
        copy = everything.as_strided(memory.shape, strides, begin)
        for head in copy:
            make_writable(head)
        copies.append(copy.copy_(memory.nan_to_num()))
    return copies


def make_writable(memory: torch.Tensor) -> None:
    """Let the process write the pages of a tensor in a mapping that it could only read."""
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - first
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert mprotect(first, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("contexts", [(1,), (3, 4, 5), (7, 8, 9), (31, 32, 33)], ids=str)
def test_contexts_around_a_page_and_a_tile(contexts: tuple[int, ...]) -> None:
    """Pages of 4 tokens, tiles of 32."""
    Decode(*contexts).check()


@pytest.mark.parametrize("context", [63, 64, 65, 130])
def test_contexts_around_a_split(context: int) -> None:
    """A program reads one split of 64 tokens; `reduce_kernel` combines the splits."""
    Decode(context, page_size=16).check()


def test_short_and_long_contexts_together() -> None:
    """The grid is as wide as the page table: only the first split of the short context has work."""
    Decode(2, 300, page_size=16).check()


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1)], ids=["1 to 1", "3 to 1", "7 to 1"])
def test_query_heads_read_the_kv_head_of_their_group(heads: tuple[int, int]) -> None:
    """Query head h reads KV head h // group. A tile may have more rows than a group has heads."""
    Decode(5, 9, heads=heads).check()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size(page_size: int) -> None:
    Decode(page_size, page_size + 1, 2 * page_size + 1, page_size=page_size).check()


@pytest.mark.parametrize("dim", [24, 80])
def test_head_sizes_that_are_no_power_of_two(dim: int) -> None:
    """Blocks are rounded up: the numbers after those of a head belong to another head or slot."""
    Decode(5, 9, heads=(6, 2), dim=dim).check()


def test_keys_and_values_of_different_size() -> None:
    decode = Decode(5, 9)
    decode.values = decode.values[..., :16].contiguous()
    assert decode.got().shape == (2, 6, 16), "the output is as wide as the values: [2, 6, 16]"
    decode.check()


def test_half_precision() -> None:
    """With float16 inputs, scores and softmax are still float32."""
    decode = Decode(5, 40, dtype=torch.float16)
    assert decode.got().dtype == torch.float16
    decode.check()


def test_heads_that_are_far_apart() -> None:
    """KV head 2 begins at number 2.4 billion of the keys, and 32 bits end at 2.1 billion."""
    decode = Decode(5, 9, heads=(6, 3), dtype=torch.float16)
    decode.keys, decode.values = far_apart(decode.keys, decode.values)
    got, expected = decode.got().double(), decode.expected()
    for head in range(6):
        error = float((got[:, head] - expected[:, head]).norm() / expected[:, head].norm())
        assert error < decode.tolerance, (
            f"I1: query head {head} reads KV head {head // 2}, which begins at number "
            f"{head // 2} * {FAR}: relative error {error:.1e}. Program ids are numbers of 32 bits, "
            "and so is their product with a stride: widen them first"
        )


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) overflows in any type: a tile must subtract the maximum first."""
    decode = Decode(40, 5)
    decode.query *= 400.0
    decode.check()
