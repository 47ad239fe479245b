"""kv_quant: 4 bits with a scale for each channel of a page of keys, as `measure --bits` has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milestones.chain import load
from milestones.course.student.measure_channels import (
    STEPS,
    In4Bits,
    attend,
    in_4_bits,
    in_4_bits_rotated,
    packed_pages,
)
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests.conftest import build_engine
from tests.helpers.oracle import drain, greedy

pytestmark = [pytest.mark.since("kv_quant"), pytest.mark.cpu]

PAGE_SIZE, LENGTH = 16, 70
CHUNKS = [1, 2, 3, 7, 16, 64]


def numbers(*shape: int) -> torch.Tensor:
    """Return random numbers in which some channels are large, as in the keys of a model."""
    drawn = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=drawn)
    x[..., 3] += 9
    x[..., 5] *= 20
    return x


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_number_is_off_by_at_most_half_a_step(dim: int) -> None:
    """Against float64. The scale and the zero point are rounded to float16."""
    x = numbers(5, 3, 16, 8)
    off = (in_4_bits(x, dim).double() - x.double()).abs()
    low, high = x.double().amin(dim, keepdim=True), x.double().amax(dim, keepdim=True)
    rounded = (low.abs() + (high - low)) * 2.0**-10
    assert bool((off <= (high - low) / STEPS / 2 + rounded).all())
    assert float((off / ((high - low) / STEPS / 2)).max()) > 0.95
    assert int((in_4_bits(x, dim)[0, 0] - low[0, 0]).flatten().unique().numel()) > STEPS


def test_equal_numbers_stay_equal_and_nan_stays_nan() -> None:
    x = numbers(4, 16, 8)
    x[1, :, 2], x[2, 3, 4], x[3, 5, 6] = 0.5, torch.nan, torch.inf
    found = in_4_bits(x, dim=1)
    assert found[1, :, 2].tolist() == [0.5] * 16, "0 / 0 is NaN"
    assert not found[2, :, 4].isfinite().any() and not found[3, 5, 6].isfinite()
    found[2, :, 4] = found[3, :, 6] = 0
    assert found.isfinite().all(), "only these channels"


def test_a_scale_for_each_channel_serves_large_channels() -> None:
    """The reason for it: a scale for each token would be as large as its largest channel."""
    x = numbers(2, 64, 8)
    small = [channel for channel in range(8) if channel not in (3, 5)]
    by_channel, by_token = (
        (found - x)[..., small].square().mean().sqrt()
        for found in (packed_pages(x, PAGE_SIZE), in_4_bits(x, dim=-1))
    )
    assert float(by_token) > 5 * float(by_channel)


def test_a_rotation_serves_large_channels() -> None:
    """It spreads them over all numbers, so a scale for each token is smaller. I2: no neighbour."""
    x = numbers(2, 64, 64)
    rotated, plain = in_4_bits_rotated(x), in_4_bits(x, dim=-1)
    assert float((rotated - x).norm()) < 0.7 * float((plain - x).norm())
    torch.testing.assert_close(in_4_bits_rotated(x[:, 5:6]), rotated[:, 5:6])


def attend_in_chunks(chunk: int, groups: str) -> torch.Tensor:
    """Return the attention of all queries, [LENGTH, heads, dim], computed chunk by chunk.

    groups: the keys that share scales. `page`: those of a page, packed when it is full; a query
    reads its own page in float. `chunk`: those of a chunk, packed when it ends; a query reads its
    own chunk in float.
    """
    query, keys, values = numbers(LENGTH, 4, 8), numbers(2, LENGTH, 8), numbers(2, LENGTH, 8) / 7
    positions, outputs = torch.arange(LENGTH), []
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        k = keys[:, :end]
        if groups == "page":
            packed = packed_pages(k, PAGE_SIZE)
            pages = positions[:end] // PAGE_SIZE
            is_own = pages == pages[start:end, None]
        else:
            packed = torch.cat([in_4_bits(x, dim=1) for x in k.split(chunk, dim=1)], dim=1)
            is_own = (positions[:end] >= start).expand(end - start, end)
        outputs.append(attend(query[start:end], k, packed, values[:, :end], is_own, SCALE))
    return torch.cat(outputs)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_position_alone_decides_what_a_query_reads(chunk: int) -> None:
    """I2: queries in chunks of 1 to 64 tokens, against float64, query by query."""
    query, keys, values = (
        x.double()
        for x in (numbers(LENGTH, 4, 8), numbers(2, LENGTH, 8), numbers(2, LENGTH, 8) / 7)
    )
    rounded = packed_pages(keys.float(), PAGE_SIZE).double()
    found = attend_in_chunks(chunk, "page").double()
    for position in range(LENGTH):
        first = position // PAGE_SIZE * PAGE_SIZE
        read = torch.cat([rounded[:, :first], keys[:, first : position + 1]], dim=1)
        k, v = (x.repeat_interleave(2, dim=0) for x in (read, values[:, : position + 1]))
        weights = (torch.einsum("hd,hsd->hs", query[position], k) * SCALE).softmax(-1)
        wanted = torch.einsum("hs,hsd->hd", weights, v)
        torch.testing.assert_close(found[position], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", CHUNKS[:-1])
def test_groups_that_end_with_chunks_lose_i2(chunk: int) -> None:
    """The same keys, packed at the ends of chunks: the results depend on the chunks."""
    whole, parts = (attend_in_chunks(size, "chunk") for size in (LENGTH, chunk))
    assert float((whole - parts).abs().max()) > 1e-3
    whole, parts = (attend_in_chunks(size, "page") for size in (LENGTH, chunk))
    assert float((whole - parts).abs().max()) < 1e-4


def test_decodes_and_chunks_of_a_batch() -> None:
    """The operations of an engine, with pages in any order: each query reads what it should."""
    attention = load("m5_overlap", "attention")
    case = PagedCase(attention, [40, 7, 33, 20], [1, 1, 9, 20], dim=8)
    found = case.run(In4Bits(attention))  # type: ignore[arg-type]
    keys, values, start = case.keys.clone(), case.values.clone(), 0
    value = in_4_bits(case.value, dim=-1)
    attention.store_kv(keys, values, case.key, value, case.meta)
    size = case.meta.page_size
    for row, (context, count) in enumerate(zip([40, 7, 33, 20], [1, 1, 9, 20], strict=True)):
        positions = torch.arange(context)
        slots = case.meta.page_table[row, positions // size].long() * size + positions % size
        k, v = (memory.flatten(1, 2)[:, slots] for memory in (keys, values))
        pages = positions // size
        is_own = pages == pages[-count:, None]
        q = case.query[start : start + count]
        wanted = attend(q, k, packed_pages(k, size), v, is_own, SCALE)
        assert torch.equal(found[start : start + count], wanted)
        start += count


def engine_in_4_bits(**config: Any) -> Any:
    engine: Any = build_engine("m5_overlap", attention_backend="torch", page_size=4, **config)
    engine.core.runner.ops = In4Bits(engine.core.runner.ops)
    return engine


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_and_cached_prefixes_change_no_token(chunk: int) -> None:
    """I2: a prefix from the tree ends with a full page, so all that is read of it is packed."""
    prompts = [list(range(5, 75)), [*range(5, 40), 9, 9], [7] * 33]
    params = greedy(12, ignore_eos=True)
    whole, parts = (engine_in_4_bits(max_num_batched_tokens=n) for n in (2048, chunk))
    for _again in range(2):  # the second time, the tree has their pages
        ours, theirs = (engine.generate(prompts, params) for engine in (parts, whole))
        assert [o.outputs for o in ours] == [o.outputs for o in theirs]
    assert parts.stats().cached_prompt_tokens > 0


def test_retractions_change_no_token() -> None:
    """I2: a request that is computed again has the same pages."""
    prompts = [[7 * i % 256 for i in range(n, n + 18)] for n in range(5)]
    answers = []
    for num_pages in (200, 24):
        engine = engine_in_4_bits(num_pages=num_pages, max_model_len=64)
        engine.core.scheduler.admission.new_token_ratio = 0.0
        for n, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy(30, ignore_eos=True), f"{n}")
        found = drain(engine)
        answers.append({name: found[name][-1].outputs[0].token_ids for name in found})
        retracted = engine.stats().num_retractions
    assert answers[0] == answers[1] and retracted > 0
