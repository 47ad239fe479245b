"""m3.6: paged decode in Triton. `kernels.decode_kernel`, run by Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from triton.runtime.errors import InterpreterError

from m3_paged import attention, kernels, triton_ops
from milestones.paged_case import OUT_OF_RANGE, SCALE, PagedCase

MARK = 12345.0
OUTPUTS = {"partial": 5, "partial_lse": 6}  # of the kernel, and the places of these arguments


class Guarded:
    """Launches a kernel with memory behind its outputs: a store there is a failure, not a crash."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.beyond: list[str] = []  # names of the outputs that were left

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
    """Some decodes over memory that is NaN wherever no token was written."""

    def __init__(
        self, *contexts: int, heads: tuple[int, int] = (4, 2), dim: int = 32, page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        case = PagedCase(attention, [*contexts], [1] * len(contexts), heads, dim, page_size, dtype)
        attention.store_kv(case.keys, case.values, case.key, case.value, case.meta)
        self.contexts, self.tolerance = contexts, case.tolerance
        self.query, self.keys, self.values, self.meta = (
            case.query,
            case.keys,
            case.values,
            case.meta,
        )
        # Behind a row's pages the table leads to page 0, all NaN: who reads too far gets a NaN, not
        # a crash. The table itself is part of a larger one, for the same reason.
        rows, width = self.meta.page_table.shape
        table = torch.zeros(rows + 1, width + 600, dtype=torch.int32)
        table[:rows, :width] = torch.where(
            self.meta.page_table == OUT_OF_RANGE, 0, self.meta.page_table
        )
        self.meta.page_table = table[:rows, :width]

    def expected(self) -> torch.Tensor:
        """The torch version, in float64."""
        query, keys, values = (x.double() for x in (self.query, self.keys, self.values))
        return attention.paged_decode(query, keys, values, self.meta, SCALE)

    def got(self) -> torch.Tensor:
        """The kernel's, through its launcher. What the interpreter wraps is unwrapped."""
        guarded = Guarded(kernels.decode_kernel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "decode_kernel", guarded)
            try:
                got = triton_ops.paged_decode(self.query, self.keys, self.values, self.meta, SCALE)
            except InterpreterError as error:
                raise (error.__cause__ or error) from None
        assert guarded.beyond == [], (
            f"stored beyond the end of {guarded.beyond}: that memory belongs to somebody else. A "
            "store needs a mask, as a load does: the tile has more rows than there are heads, and "
            "its blocks may be wider than VALUE_DIM"
        )
        return got

    def check(self) -> None:
        """Every head of every request, by itself."""
        got, expected = self.got(), self.expected()
        for row, context in enumerate(self.contexts):
            for head in range(expected.shape[1]):
                ours, theirs = got[row, head].double(), expected[row, head]
                where = f"request {row} of contexts {self.contexts}, query head {head}"
                assert not ours.isnan().any(), (
                    f"{where}: NaN. Of its pages only the {context} slots of its context are "
                    "written: what lies behind must not even be loaded (0 times NaN is NaN)"
                )
                error = float((ours - theirs).norm() / theirs.norm())
                assert error < self.tolerance, (
                    f"I1: {where}: off by {error:.1e} of the torch version in float64"
                )


@pytest.mark.parametrize("contexts", [(1,), (3, 4, 5), (7, 8, 9), (31, 32, 33)], ids=str)
def test_contexts_around_a_page_and_a_tile(contexts: tuple[int, ...]) -> None:
    """Pages of 4 tokens, tiles of 32."""
    Decode(*contexts).check()


@pytest.mark.parametrize("context", [255, 256, 257, 520])
def test_contexts_around_a_split(context: int) -> None:
    """A program reads 256 tokens; the next one goes on, and `reduce_kernel` puts them together."""
    Decode(context, page_size=16).check()


def test_short_and_long_contexts_together() -> None:
    """The grid is as wide as the page table: of the short one, only the first split has work."""
    Decode(2, 300, page_size=16).check()


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1)], ids=["1 to 1", "3 to 1", "7 to 1"])
def test_query_heads_read_the_kv_head_of_their_group(heads: tuple[int, int]) -> None:
    """Query head h reads KV head h // group; a group that is no power of two leaves rows empty."""
    Decode(5, 9, heads=heads).check()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_any_page_size(page_size: int) -> None:
    Decode(page_size, page_size + 1, 2 * page_size + 1, page_size=page_size).check()


@pytest.mark.parametrize("dim", [24, 80])
def test_head_sizes_that_are_no_power_of_two(dim: int) -> None:
    """Blocks are rounded up: what is beyond a head's numbers belongs to somebody else."""
    Decode(5, 9, heads=(6, 2), dim=dim).check()


def test_keys_and_values_of_different_size() -> None:
    decode = Decode(5, 9)
    decode.values = decode.values[..., :16].contiguous()
    assert decode.got().shape == (2, 4, 16), "heads as wide as the values: [2, 4, 16]"
    decode.check()


def test_half_precision() -> None:
    """Scores and softmax are float32 all the same."""
    decode = Decode(5, 40, dtype=torch.float16)
    assert decode.got().dtype == torch.float16
    decode.check()


def test_large_scores_do_not_overflow() -> None:
    """exp(1000) is infinite in any type: the maximum must come off first, tile by tile."""
    decode = Decode(40, 5)
    decode.query *= 400.0
    decode.check()


def test_a_row_that_pads_a_batch_gives_zeros() -> None:
    """Its length is 0: no program of it has work."""
    decode = Decode(5, 9)
    decode.meta.seq_lens[1] = 0
    got = decode.got()[1]
    assert torch.equal(got, torch.zeros_like(got)), f"zeros for a context of 0 tokens, not {got}"
