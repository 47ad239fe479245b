"""Attention in C: compared with torch in float64, and the same bits in any batch and chunk (I2)."""

from __future__ import annotations

import random
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from common.fast import cpu_attention
from common.fast.cpu_kernels import Kernels, kernels
from common.fast.cpu_kernels.space import SPACE
from milestones.chain import load
from milestones.lab.instruments.paged_case import PagedCase
from tests.conftest import build_engine
from tests.helpers.oracle import assert_one_answer, greedy
from tests.models.conftest import on_threads

pytestmark = [
    pytest.mark.since("m3_paged"),
    pytest.mark.only_of("attention.py"),
    pytest.mark.skipif(kernels() is None, reason="no C compiler"),
    pytest.mark.cpu,
]


@pytest.fixture
def ops() -> ModuleType:
    return cpu_attention


@pytest.fixture
def each_ops(compiled: Kernels, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The functions on the kernels of each width."""
    monkeypatch.setattr(cpu_attention, "kernels", lambda: compiled)
    return cpu_attention


EDGES = [  # contexts and new tokens of the requests, at the edges of pages, parts and blocks
    ([1], [1]),
    ([1, 3, 4, 5, 8], [1, 1, 1, 1, 1]),
    ([4, 5, 3], [4, 5, 3]),
    ([1, 255, 256, 257, 513], [1, 1, 1, 1, 1]),
    ([7, 16, 70, 2, 65], [1, 1, 70, 2, 3]),
    ([300, 5], [300, 5]),
    ([63, 64, 65, 600], [63, 64, 65, 130]),
]


@pytest.mark.parametrize(("contexts", "counts"), EDGES, ids=str)
def test_attention_at_the_edges(
    attention: ModuleType, each_ops: ModuleType, contexts: list[int], counts: list[int]
) -> None:
    case = PagedCase(attention, contexts, counts)
    assert case.error(each_ops) < case.tolerance


def test_attention_of_random_batches(attention: ModuleType, each_ops: ModuleType) -> None:
    """The batches have many head ratios and page sizes, and heads that do not fill a register."""
    chance = random.Random(0)
    for _ in range(60):
        counts = [1] * chance.randint(0, 5)
        counts += [chance.randint(2, 80) for _ in range(chance.randint(0 if counts else 1, 4))]
        contexts = [n + chance.choice([0, 0, 1, 7, 64, 300]) for n in counts]
        kv_heads, group = chance.choice([1, 2, 3]), chance.randint(1, 9)
        dim, page_size = chance.choice([1, 8, 16, 20, 31, 64, 80, 128]), chance.choice([1, 3, 16])
        case = PagedCase(attention, contexts, counts, (group * kv_heads, kv_heads), dim, page_size)
        assert case.error(each_ops) < case.tolerance, (contexts, counts, kv_heads, group, dim)


# One, two, three and seven queries for each key, and heads that are and are not whole registers.
SHAPES = [((4, 4), 16), ((4, 4), 31), ((4, 2), 20), ((4, 2), 80), ((9, 3), 24), ((9, 3), 32)]
SHAPES += [((7, 1), 16), ((7, 1), 31)]


@pytest.mark.parametrize(("heads", "dim"), SHAPES, ids=str)
def test_a_query_gets_the_same_bits_in_any_batch_and_chunk(
    attention: ModuleType, each_ops: ModuleType, heads: tuple[int, int], dim: int
) -> None:
    """I2: each token of a batch is computed again, alone, as in a decode.

    The cases have every number of rows in a tile, because a compiler may copy a loop for each
    number, and the copies may round differently.
    """
    case = PagedCase(attention, [300, 33, 290, 40], [1, 1, 31, 40], heads, dim, page_size=16)
    meta, whole, at = case.meta, case.run(each_ops), 0
    keys, values = case.keys.clone(), case.values.clone()
    each_ops.store_kv(keys, values, case.key, case.value, meta)
    for row, (context, count) in enumerate(
        zip(meta.seq_lens_cpu, meta.query_lens_cpu, strict=True)
    ):
        for length in range(context - count + 1, context + 1):
            alone = attention.AttentionMetadata(
                slot_mapping=meta.slot_mapping[at : at + 1],
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([length], dtype=torch.int32),
                page_table=meta.page_table[row : row + 1, : -(-length // 16)],
                page_size=16,
                num_decodes=1,
                query_lens_cpu=[1],
                seq_lens_cpu=[length],
            )
            got = each_ops.paged_decode(case.query[at : at + 1], keys, values, alone, 0.25)
            assert torch.equal(got[0], whole[at]), f"request {row}, token {length - 1}"
            at += 1


def test_the_number_of_threads_changes_nothing(attention: ModuleType, ops: ModuleType) -> None:
    case = PagedCase(attention, [700, 9, 70], [1, 1, 70])
    first, *others = on_threads(lambda: case.run(ops))
    assert all(torch.equal(first, other) for other in others)


def test_numbers_of_another_type_are_refused(attention: ModuleType, ops: ModuleType) -> None:
    case = PagedCase(attention, [9], [1])
    case.meta.seq_lens = case.meta.seq_lens.long()
    with pytest.raises(TypeError, match="lengths must be int32"):
        case.run(ops)
    with pytest.raises(TypeError, match="float32 on a CPU"):
        PagedCase(attention, [9], [1]).run(ops, torch.bfloat16)


def test_what_does_not_fit_together_is_refused(attention: ModuleType, ops: ModuleType) -> None:
    case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
    case.meta.seq_lens = case.meta.seq_lens[:2]
    with pytest.raises(ValueError, match="for each request"):
        case.run(ops)
    for name in ("key", "value"):
        case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
        setattr(case, name, getattr(case, name)[:-1])
        with pytest.raises(ValueError, match=f"are not the {name}s of 14 tokens"):
            case.run(ops)
    case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
    case.query = case.query[..., :-1]
    with pytest.raises(ValueError, match="queries"):
        case.run(ops)
    case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
    case.meta.page_table = case.meta.page_table[:, :1].contiguous()
    with pytest.raises(ValueError, match="30 tokens do not fit in 1 pages"):
        case.run(ops)


def test_pages_that_no_request_has_yet_cost_nothing(
    attention: ModuleType, ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page table may have columns for the longest request. Unused columns add no work."""
    case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
    taken: list[int] = []
    take = SPACE.take

    def noted(count: int) -> int:
        taken.append(count)
        return take(count)

    monkeypatch.setattr(SPACE, "take", noted)
    expected, narrow = case.run(ops), taken.copy()
    taken.clear()
    case.meta.page_table = F.pad(case.meta.page_table, (0, 5000))
    assert torch.equal(case.run(ops), expected)
    assert taken == narrow and len(narrow) == 2


def test_tensors_may_be_views(attention: ModuleType, ops: ModuleType) -> None:
    """Models pass transposed heads, and page tables are slices of wider ones."""
    case = PagedCase(attention, [9, 30, 12], [1, 1, 12])
    expected = case.run(ops)
    case.meta.page_table = F.pad(case.meta.page_table, (0, 5), value=1)[:, :-5]
    for name in ("query", "key", "value"):
        x = getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1)
        setattr(case, name, x)
    assert torch.equal(case.run(ops), expected)
    for name in ("query", "key", "value"):  # even the numbers of one head are not contiguous
        setattr(case, name, getattr(case, name).transpose(0, 2).contiguous().transpose(0, 2))
    assert torch.equal(case.run(ops), expected)


def test_kernels_that_cannot_run_are_refused(
    milestone: str, attention: ModuleType, ops: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = load(milestone, "attention_backend").select_backend
    single, half = (
        SimpleNamespace(device=torch.device("cpu"), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert select("auto", single, [], 16) is ops
    assert select("auto", half, [], 16) is attention
    with pytest.raises(RuntimeError, match="float32 on a CPU"):
        select("compiled", half, [], 16)
    monkeypatch.setattr(ops, "kernels", lambda: None)
    with pytest.raises(RuntimeError, match="a C compiler"):
        select("compiled", single, [], 16)
    assert select("auto", single, [], 16) is attention


@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_one_answer_on_both_backends(milestone: str, backend: str, architecture: str) -> None:
    model = f"tiny-{architecture}"
    engine = build_engine(milestone, model, attention_backend=backend, page_size=4,
                          max_num_batched_tokens=11, max_num_seqs=3)  # fmt: skip
    for output in engine.generate([[7], list(range(40, 57)), [1, 2], list(range(9))], greedy(8)):
        assert_one_answer(model, output, 8)
