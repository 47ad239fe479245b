"""m3.2: a flat batch and its slots. `InputBuilder.prepare` and `flatten`."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from common import EngineConfig
from m3_paged.kv_cache import PageTable
from m3_paged.model_input import ModelInput
from m3_paged.model_runner import ModelRunner
from m3_paged.schedule_batch import ScheduleBatch
from milestones.lab.instruments.hash_model import HashModel, expected_tokens
from tests.exercises.by_hand import make_request

PAGES = ([7, 2, 9, 4, 12], [5, 11, 3, 8, 1], [6, 10, 13, 14, 15])  # of rows 0, 1 and 2


def make_runner(page_size: int = 4) -> ModelRunner:
    config = EngineConfig(max_model_len=80, max_num_seqs=4, page_size=page_size, num_pages=20)
    # The check at loading calls `flatten` too. It is off here: the tests themselves check it.
    with patch("m3_paged.model_runner.check_paged"):
        return ModelRunner(HashModel().eval(), config)  # type: ignore[arg-type]


def prepare(*spans: tuple[int, int], prompt: int = 20, page_size: int = 4) -> ModelInput:
    """Return the input of a step in which request i, in row i, computes span i, the end excluded.

    Each request has a prompt of `prompt` tokens, `20 i + 1`, `20 i + 2`, …; a request is sampled
    only if its span reaches the end of its prompt.
    """
    runner = make_runner(page_size)
    requests = []
    for row, (start, _end) in enumerate(spans):
        tokens = [20 * row + 1 + p for p in range(prompt)]
        request = make_request(f"{row}", tokens, computed=start)
        request.row = row
        runner.inputs.page_table[row, : len(PAGES[row])] = torch.tensor(PAGES[row])
        requests.append(request)
    counts = [end - start for start, end in spans]
    sampled = [i for i, (_, end) in enumerate(spans) if end == prompt]
    return runner.inputs.prepare(ScheduleBatch(requests, counts, sampled))


def test_tokens_lie_one_after_the_other() -> None:
    """Three requests compute 1, 3 and 2 tokens, and write through rows 0, 1 and 2."""
    inputs = prepare((19, 20), (3, 6), (0, 2))
    meta = inputs.metadata
    assert inputs.input_ids.tolist() == [[20, 24, 25, 26, 41, 42]], "one list without padding"
    assert inputs.position_ids.tolist() == [[19, 3, 4, 5, 0, 1]], "I1: each token has its position"
    assert meta.query_start_loc.tolist() == [0, 1, 4, 6], "each begin, and the end of the last one"
    assert meta.query_lens_cpu == [1, 3, 2], "the token counts, as a list"
    slots = [12 * 4 + 3, 5 * 4 + 3, 11 * 4, 11 * 4 + 1, 6 * 4, 6 * 4 + 1]
    assert meta.slot_mapping.tolist() == slots, f"I2: rows 0, 1 and 2 have the pages {PAGES}"


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_a_position_is_in_the_slot_the_table_says(page_size: int) -> None:
    """At the edges of pages, one token before and after them, and across several pages."""
    last = 5 * page_size
    spans = {(a, b) for e in (page_size, 2 * page_size) for a in (0, e - 1, e) for b in (e, e + 1)}
    for start, end in sorted((a, b) for a, b in spans if a < b <= last):
        got = prepare((start, end), prompt=80, page_size=page_size).metadata.slot_mapping.tolist()
        expected = [PAGES[0][p // page_size] * page_size + p % page_size for p in range(start, end)]
        assert got == expected, f"I1: positions {start} to {end - 1} in the pages {PAGES[0]}"


def test_slots_do_not_overflow_32_bits() -> None:
    """Page 200 000 000 of 16 tokens begins at slot 3.2 billion: too much for int32."""
    runner = make_runner(page_size=16)
    request = make_request("A", 20, computed=19)
    request.row = 1
    runner.inputs.page_table[1, 1] = 200_000_000
    got = runner.inputs.prepare(ScheduleBatch([request], [1], [0])).metadata.slot_mapping.tolist()
    assert got == [3_200_000_003], "position 19 is slot 200 000 000 * 16 + 3"


def test_the_page_table_names_the_rows_of_the_batch() -> None:
    """The rows are in the order of the batch, and as wide as the longest context needs."""
    runner = make_runner()
    requests = []
    for row, computed in ((2, 9), (0, 16)):
        request = make_request(f"{row}", 20, computed=computed)
        request.row = row
        runner.inputs.page_table[row, :5] = torch.tensor(PAGES[row])
        requests.append(request)
    table = runner.inputs.prepare(ScheduleBatch(requests, [1, 1], [])).metadata.page_table
    assert table.shape == (2, 5), "2 requests, and 17 tokens in pages of 4"
    rows = table[0, :3].tolist(), table[1].tolist()
    assert rows == (PAGES[2][:3], PAGES[0]), "I1: rows 2 and 0 of the table, for 10 and 17 tokens"


def test_the_kernels_get_the_types_that_they_read() -> None:
    """A kernel reads the memory of a tensor as numbers of one size. torch does not convert them."""
    meta = prepare((19, 20), (3, 6)).metadata
    assert meta.slot_mapping.dtype == torch.int64, "I1: slots may be too large for int32"
    for name in ("query_start_loc", "seq_lens", "page_table"):
        assert getattr(meta, name).dtype == torch.int32, f"I1: the type of {name}"


def test_a_chunk_ends_where_it_ends() -> None:
    """A chunk of tokens 8 to 11 sees 12 tokens of its prompt of 20; the rest is not computed."""
    meta = prepare((8, 12), (19, 20)).metadata
    assert meta.seq_lens.tolist() == [12, 20], "I1: the contexts are 12 and 20"
    assert meta.seq_lens_cpu == [12, 20], "I1: the contexts on the host are the same"
    table = prepare((8, 12)).metadata.page_table
    assert table.shape == (1, 3), (
        "the widest context is 12 of the 20 tokens, which are 3 pages of 4: the page table is as "
        "wide as that, because kernels start programs for its whole width"
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(19, 20), (3, 6), (0, 2)], [0]),
        ([(19, 20), (3, 20), (0, 2)], [0, 17]),
        ([(0, 5), (18, 20)], [6]),
        ([(0, 5), (3, 6)], []),
    ],
    ids=["a decode", "a decode and a last chunk", "a chunk and a last chunk", "chunks alone"],
)
def test_logits_are_asked_for_where_a_prompt_ends(
    spans: list[tuple[int, int]], expected: list[int]
) -> None:
    assert prepare(*spans).logits_indices.tolist() == expected, (
        f"I1: the step computes {spans} of prompts of 20: it samples at {expected} of the flat list"
    )


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(19, 20), (19, 20), (3, 6)], 2),
        ([(3, 6), (0, 2)], 0),
        ([(19, 20)] * 3, 3),
        ([(19, 20), (3, 6), (0, 1)], 1),
    ],
    ids=["mixed", "chunks alone", "decodes alone", "a last chunk of one token"],
)
def test_decodes_are_told_from_chunks(spans: list[tuple[int, int]], expected: int) -> None:
    got = prepare(*spans).metadata.num_decodes
    assert got == expected, (
        f"of {spans}, the first {expected} have one token each, not the first {got}: a chunk "
        "after a longer chunk is no decode, even if the budget left it one token"
    )


@pytest.mark.parametrize(
    "chunks", [[13], [1] * 13, [4, 4, 5], [5, 3, 5], [12, 1], [1, 12]], ids=str
)
def test_any_chunks_give_the_same_next_token(chunks: list[int]) -> None:
    """With the hash model, on memory full of NaN, a wrong slot or position changes the token."""
    runner, prompt = make_runner(), [3 * i + 1 for i in range(13)]
    for memory in (*runner.kv_pool.keys, *runner.kv_pool.values):
        memory.fill_(torch.nan)
    table = PageTable(4)
    table.append(2, PAGES[2][:4])
    request = make_request("A", prompt)
    request.row = 2
    for chunk in chunks:
        last = request.num_computed_tokens + chunk == len(prompt)
        batch = ScheduleBatch([request], [chunk], [0] if last else [])
        result = list(runner.run(batch, table).rows())
        request.num_computed_tokens += chunk
    tokens = [token for token, _ in result]
    assert tokens == expected_tokens(prompt, 1), f"I2: after 13 tokens in chunks of {chunks}"
