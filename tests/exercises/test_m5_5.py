"""m5.5: decode steps are padded to a few fixed sizes, in memory that keeps its addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from common import EngineConfig, Request
from m5_overlap import model_runner
from m5_overlap.cuda_graph import CUDAGraphMode, DecodeGraphs
from m5_overlap.model_input import BatchDescriptor, ModelInput
from m5_overlap.model_runner import ModelRunner
from m5_overlap.placeholders import placeholder
from m5_overlap.schedule_batch import ScheduleBatch
from tests.conftest import shared_model
from tests.exercises.by_hand import make_request

PAGE_SIZE, MAX_MODEL_LEN = 4, 30


class PlainBuffers:
    """Buffers that copy, because these tests must not depend on how buffers take turns."""

    in_use = None

    def __init__(self, device: torch.device) -> None:
        """Hold nothing."""

    def begin(self) -> None:
        """Wait for nothing."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


@pytest.fixture
def runner() -> ModelRunner:
    """A runner with a memory full of numbers."""
    runner = make_runner()
    for memory in (*runner.kv_pool.keys, *runner.kv_pool.values):
        memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(1)))
    return runner


def make_runner() -> ModelRunner:
    """Return a runner of a tiny model: static steps of 1, 2 and 4 requests, pages of 4 tokens."""
    config = EngineConfig(
        model="tiny-llama", device="cpu", page_size=PAGE_SIZE, num_pages=20, max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    with patch.object(model_runner, "StepBuffers", PlainBuffers):
        runner = ModelRunner(shared_model("tiny-llama").model, config)
    runner.graphs.sizes = [1, 2, 4]
    return runner


def request_in(
    runner: ModelRunner, row: int, pages: list[int], computed: int, num_tokens: int | None = None
) -> Request:
    """Return a request in a row: tokens 10 * row, 10 * row + 1, …, all but the last computed.

    num_tokens: for a prompt of which more tokens are not computed.
    """
    request = make_request(f"row {row}", range(10 * row, 10 * row + (num_tokens or computed + 1)))
    request.row, request.num_computed_tokens = row, computed
    runner.inputs.page_table[row + 1, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return request


def three_decodes(runner: ModelRunner, computed: tuple[int, int, int] = (5, 2, 9)) -> ScheduleBatch:
    """Return a step of three requests in rows 0, 2 and 3."""
    rows = zip((0, 2, 3), ([5, 6, 7], [8, 9, 2], [1, 3, 4]), computed, strict=True)
    return batch_of(*((request_in(runner, *row), 1) for row in rows))


def batch_of(*parts: tuple[Request, int]) -> ScheduleBatch:
    """Return a step of these numbers of tokens."""
    batch = ScheduleBatch()
    for request, num_tokens in parts:
        batch.add(request, num_tokens)
    return batch


def tensors_of(inputs: ModelInput) -> dict[str, torch.Tensor]:
    """Return the tensors that a graph reads."""
    meta = inputs.metadata
    return {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "slot_mapping": meta.slot_mapping,
        "seq_lens": meta.seq_lens,
        "page_table": meta.page_table,
    }


def padded_input(runner: ModelRunner, batch: ScheduleBatch) -> ModelInput:
    """Return the input of a decode batch that is padded to four requests."""
    return runner.inputs.prepare(batch, BatchDescriptor(4))


def decodes(count: int) -> ScheduleBatch:
    """Return a step of that many decodes."""
    requests = [make_request(f"r{i}", [1, 2]) for i in range(count)]
    for request in requests:
        request.num_computed_tokens = 1
    return batch_of(*((request, 1) for request in requests))


def test_a_decode_batch_runs_as_the_next_size_there_is() -> None:
    graphs = DecodeGraphs(torch.Tensor, [1, 2, 4, 8, 16], 8, capture=False)
    chosen = {n: graphs.dispatch(decodes(n)) for n in (1, 2, 3, 4, 5, 8, 9, 16)}
    assert {mode for mode, _ in chosen.values()} == {CUDAGraphMode.FULL}, (
        "each of these decode batches fits into one of the sizes 1, 2, 4, 8 and 16"
    )
    sizes = {n: descriptor.num_reqs for n, (_, descriptor) in chosen.items()}
    assert sizes == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 16: 16}, "requests: their size"


def test_a_batch_larger_than_the_largest_graph_has_none() -> None:
    """Such a batch runs as it is, by a forward that is not captured."""
    for sizes in ([1, 2, 4], []):
        graphs = DecodeGraphs(torch.Tensor, sizes, 8, capture=False)
        assert graphs.dispatch(decodes(5)) == (CUDAGraphMode.NONE, BatchDescriptor(5)), (
            f"5 requests fit none of the sizes {sizes}: the batch runs as it is, with 5 requests"
        )


def test_a_step_that_is_no_decode_has_no_graph() -> None:
    """A chunk of three tokens, and one of a single token in the middle of a prompt."""
    graphs = DecodeGraphs(torch.Tensor, [1, 2, 4], 8, capture=False)
    prompt = make_request("prompt", range(9))
    for num_tokens in (3, 1):
        mode, descriptor = graphs.dispatch(batch_of((prompt, num_tokens)))
        assert (mode, descriptor) == (CUDAGraphMode.NONE, BatchDescriptor(1)), (
            f"a chunk of {num_tokens} of 9 prompt tokens is no decode: the batch of one request "
            "runs as it is"
        )


def test_a_decode_batch_is_laid_out_and_padded(runner: ModelRunner) -> None:
    """The table is as wide as this step needs."""
    batch = three_decodes(runner)
    inputs = padded_input(runner, batch)
    meta = inputs.metadata
    assert batch.num_scheduled_tokens == [1, 1, 1], (
        "the batch has three requests: padding must not be added to its own list"
    )
    assert inputs.input_ids.tolist() == [[5, 22, 39, 0]], (
        "each request feeds its first token that is not computed; a row of padding feeds token 0"
    )
    assert inputs.position_ids.tolist() == [[5, 2, 9, 0]], (
        "I1: the position is the number of tokens before it; a row of padding is at position 0"
    )
    assert inputs.logits_indices.tolist() == [0, 1, 2, 3], "a graph has logits for each of its rows"
    assert meta.seq_lens.tolist() == meta.seq_lens_cpu == [6, 3, 10, 1], (
        "a context ends with the token of this step; that of a row of padding is 1 token"
    )
    assert meta.query_lens_cpu == [1, 1, 1, 1], "each row computes one token, padding too"
    assert inputs.descriptor == BatchDescriptor(4), "the input has the descriptor of its graph"
    assert meta.page_table.shape[1] == 3, "as many columns as the longest request has pages"
    assert meta.page_table[:3].tolist() == [[5, 6, 7], [8, 9, 2], [1, 3, 4]], (
        "the row of a request in the table is `future_index(request.row)`: row 0 is for padding"
    )
    assert len(meta.page_table) == 4, "a row for each row of the graph"


def test_padding_writes_to_the_padding_page(runner: ModelRunner) -> None:
    """I3: a row of padding has keys and values too. They must not overwrite those of a request."""
    meta = padded_input(runner, three_decodes(runner)).metadata
    slots = meta.slot_mapping.tolist()
    assert slots[:3] == [6 * 4 + 1, 8 * 4 + 2, 4 * 4 + 1], "I1: table[p // 4] * 4 + p % 4"
    assert 0 <= slots[3] < PAGE_SIZE, "I3: padding must be written to page 0, slots 0 to 3"
    assert not meta.page_table[3].any(), "padding must read page 0 only"


def test_a_full_size_needs_no_padding(runner: ModelRunner) -> None:
    batch = three_decodes(runner)
    batch.add(request_in(runner, 5, [10], 1), 1)
    inputs = padded_input(runner, batch)
    assert inputs.descriptor == BatchDescriptor(4), "the input has the descriptor of its graph"
    assert inputs.input_ids.tolist() == [[5, 22, 39, 51]], "four requests, and no row of padding"


def test_a_batch_that_fits_no_size_runs_as_it_is(runner: ModelRunner) -> None:
    """`launch` passes no descriptor if `dispatch` returns the mode NONE."""
    inputs = runner.inputs.prepare(three_decodes(runner))
    meta = inputs.metadata
    assert inputs.descriptor is None, "no size was given"
    assert inputs.input_ids.tolist() == [[5, 22, 39]], "there must be no padding"
    assert inputs.logits_indices.tolist() == [0, 1, 2] and meta.seq_lens.tolist() == [6, 3, 10]
    assert meta.page_table.tolist() == [[5, 6, 7], [8, 9, 2], [1, 3, 4]], (
        "no row of padding, and as many columns as the longest request has pages"
    )


def test_a_step_with_a_chunk_runs_as_it_is(runner: ModelRunner) -> None:
    """One decode, a chunk in the middle of a prompt, and the last chunk of another prompt."""
    decode = request_in(runner, 0, [5, 6], 5)
    middle = request_in(runner, 1, [7, 8], 4, num_tokens=20)
    last = request_in(runner, 2, [9], 0, num_tokens=3)
    inputs = runner.inputs.prepare(batch_of((decode, 1), (middle, 3), (last, 3)))
    meta = inputs.metadata
    assert inputs.descriptor is None, "no size was given"
    assert inputs.input_ids.tolist() == [[5, 14, 15, 16, 20, 21, 22]]
    assert inputs.position_ids.tolist() == [[5, 4, 5, 6, 0, 1, 2]]
    assert inputs.logits_indices.tolist() == [0, 6], "the requests that get a next token"
    assert meta.seq_lens.tolist() == [6, 7, 3], "I1: a chunk's context ends with the chunk"
    assert meta.slot_mapping.tolist() == [25, 32, 33, 34, 36, 37, 38]


def test_a_single_token_that_is_no_decode_is_not_static(runner: ModelRunner) -> None:
    """A chunk of one token in the middle of a prompt samples no token and needs no logits."""
    middle = request_in(runner, 0, [5], 1, num_tokens=4)
    inputs = runner.inputs.prepare(batch_of((middle, 1)))
    assert inputs.descriptor is None and inputs.logits_indices.tolist() == []
    assert inputs.metadata.seq_lens.tolist() == [2], "I1: a chunk's context ends with the chunk"


def test_placeholders_travel_like_tokens(runner: ModelRunner) -> None:
    batch = three_decodes(runner)
    for request in batch.requests:
        request.token_ids[-1] = placeholder(request.row)
    ids = padded_input(runner, batch).input_ids.tolist()[0]
    assert ids[:3] == [-1, -3, -4] and ids[3] == 0, (
        f"padding must be token 0, not a placeholder: {ids}"
    )


def test_static_tensors_stay_where_they_are(runner: ModelRunner) -> None:
    """A captured graph reads fixed addresses: it never reads new tensors.

    A value that is left from the step before would be read as a value of this step. The inputs of a
    step are in buffers that are filled again: `fill` must copy them.
    """
    step = runner.graphs._make(padded_input(runner, three_decodes(runner)))
    captured, old = tensors_of(step.inputs), step.inputs.metadata
    batch = three_decodes(runner, (8, 11, 3))
    batch.requests.reverse()
    now = padded_input(runner, batch)
    step.fill(now)
    columns = -(-MAX_MODEL_LEN // PAGE_SIZE)
    assert tensors_of(step.inputs)["page_table"].shape == (4, columns), (
        f"the static page table has {columns} columns, for the longest request: requests may grow"
    )
    expected = {name: tensor.clone() for name, tensor in tensors_of(now).items()}
    for tensor in tensors_of(now).values():
        tensor.zero_()
    for tensors in (captured, tensors_of(step.inputs)):
        for name, tensor in tensors.items():
            used = tensor[..., : expected[name].shape[-1]]
            assert torch.equal(used, expected[name]), f"{name} must have the values of this step"
    assert step.inputs.metadata.seq_lens_cpu == now.metadata.seq_lens_cpu, "the lengths on the host"
    assert step.inputs.metadata is not old, (
        "I1: fill must make a new metadata: the old one may have cached what follows from the old "
        "lengths, such as decode_groups"
    )


def memory_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Return a copy of all keys and values, without the padding page."""
    pool = runner.kv_pool
    return [memory[:, 1:].clone() for memory in (*pool.keys, *pool.values)]


@torch.inference_mode()
def test_a_padded_step_gives_the_logits_of_the_plain_one(runner: ModelRunner) -> None:
    """I1: three steps on one static step, in which lengths grow and rows change places."""
    for turn, computed in enumerate([(5, 2, 9), (6, 3, 10), (2, 11, 0)]):
        batch = three_decodes(runner, computed)
        if turn == 1:
            batch.requests.reverse()
        plain = runner.forward(runner.inputs.prepare(batch)).clone()
        before = memory_of(runner)
        padded = runner.graphs.run(padded_input(runner, batch))[:3]
        error = float((padded - plain).abs().max())
        assert error < 1e-4, f"turn {turn}: padded logits differ from plain ones by {error}"
        close = [torch.allclose(a, b, atol=1e-4) for a, b in zip(before, memory_of(runner))]
        assert all(close), "I3: the row of padding wrote keys or values over those of a request"


@torch.inference_mode()
def test_padding_does_not_change_what_three_requests_say(runner: ModelRunner) -> None:
    """I1: eight tokens of each request, decoded in steps that are padded to four requests."""
    rows = (1, 2, 3)  # the first prompt must not begin with token 0, which is what padding feeds
    prompts = [[10 * row + i for i in range(4)] for row in rows]
    said: dict[bool, list[list[int]]] = {}
    for is_padded in (False, True):
        requests = [
            request_in(runner, row, pages, 0, num_tokens=4)
            for row, pages in zip(rows, ([5, 6, 7], [8, 9, 2], [1, 3, 4]), strict=True)
        ]
        batch = batch_of(*((request, 4) for request in requests))
        logits = runner.forward(runner.inputs.prepare(batch))
        for _ in range(8):
            for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
                request.num_computed_tokens = len(request.token_ids)
                request.token_ids.append(token)
            batch = batch_of(*((request, 1) for request in requests))
            if is_padded:
                logits = runner.graphs.run(padded_input(runner, batch))[:3]
            else:
                logits = runner.forward(runner.inputs.prepare(batch))
        said[is_padded] = [request.token_ids[4:] for request in requests]
    assert said[True] == said[False], (
        f"I1: after the prompts {prompts}, the requests must say the same with padding"
    )


@torch.inference_mode()
def test_a_replayed_graph_reads_what_was_filled_in(runner: ModelRunner) -> None:
    """A stand-in for a CUDA graph reads only the tensors that it was captured with."""
    batch = three_decodes(runner)
    inputs = padded_input(runner, batch)
    step = runner.graphs._make(inputs)
    runner.graphs.steps[BatchDescriptor(4)] = step
    captured = replace(step.inputs, metadata=step.inputs.metadata)  # the tensors of the capture
    seen: list[list[Any]] = []

    class Graph:
        def replay(self) -> None:
            seen.append([captured.input_ids.tolist()[0], captured.metadata.seq_lens.tolist()])

    step.graph, step.logits = Graph(), torch.zeros(4, 8)  # type: ignore[assignment]
    runner.graphs.run(padded_input(runner, three_decodes(runner, (8, 11, 3))))
    assert seen == [[[8, 31, 33, 0], [9, 12, 4, 1]]], f"the graph computed {seen}"
