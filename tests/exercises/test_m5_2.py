"""m5.2: a step is planned with placeholders for tokens that the host does not know yet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from m5_overlap.future_map import FutureMap
from m5_overlap.placeholders import PADDING_INDEX, future_index, placeholder
from tests.exercises.overlap_states import decoding, plan, running, steps_in_flight

CPU = torch.device("cpu")


def stored(**tokens_by_row: int) -> FutureMap:
    """Return a map of four rows; some of them have stored a token: `stored(row0=50)`."""
    futures = FutureMap(4, CPU)
    rows = [future_index(int(name.removeprefix("row"))) for name in tokens_by_row]
    futures.store(torch.tensor(rows), torch.tensor(list(tokens_by_row.values())))
    return futures


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([[placeholder(0), placeholder(2)]], [[50, 70]]),
        ([[placeholder(0), 7, 0, 8]], [[50, 7, 0, 8]]),  # a decode, and a chunk of a prompt
        ([-1], [50]),
        ([[-1], [3]], [[50], [3]]),
        ([[]], [[]]),
    ],
    ids=["placeholders", "both kinds in one step", "one id", "a column", "no id"],
)
def test_a_placeholder_becomes_the_token_of_its_row(ids: list[Any], expected: list[Any]) -> None:
    got = stored(row2=70, row0=50).resolve(torch.tensor(ids, dtype=torch.int64))
    assert got.dtype == torch.int64, "ids are int64"
    assert got.tolist() == expected, "row 0 stored 50, row 2 stored 70"


def test_tokens_stay_what_they_are() -> None:
    """0 is a token, whatever padding has stored, and so is an id that is larger than the map."""
    futures = stored(row0=50, row1=60)
    futures.store(torch.tensor([0]), torch.tensor([77]))
    ids = [[0, 1, 2, 49_151]]
    assert futures.resolve(torch.tensor(ids)).tolist() == ids, "I1: none of these ids is negative"


def test_a_future_stays_until_its_row_stores_again() -> None:
    """A request may pause for some steps, for lack of room. Its token must still be in the map."""
    futures = stored(row3=80)
    for token in range(20):
        futures.store(torch.tensor([future_index(0)]), torch.tensor([token]))
    got = futures.resolve(torch.tensor([placeholder(3), placeholder(0)])).tolist()
    assert got == [80, 19], "row 3 stored 80 and nothing after that; row 0 last stored 19"


def test_the_map_stays_where_it_is() -> None:
    """A CUDA graph reads the map at the address that it had when the graph was captured."""
    futures = FutureMap(4, CPU)
    graph_reads = futures.token_ids
    futures.store(torch.tensor([future_index(2)]), torch.tensor([70]))
    assert graph_reads[future_index(2)] == 70, (
        "I1: row 2 stored 70, and the tensor that the map had before has not got it: store must "
        "write into the map, not make a new one"
    )


def test_padding_is_the_future_of_no_request() -> None:
    """All rows of padding store their token in one place, which belongs to no request."""
    futures = stored(row0=50, row1=60)
    indices = torch.tensor([future_index(0), PADDING_INDEX, PADDING_INDEX])
    futures.store(indices, torch.tensor([51, 98, 99]))
    got = futures.resolve(torch.tensor([placeholder(0), placeholder(1)])).tolist()
    assert got == [51, 60], "row 0 stored 51, row 1 still has 60"


def test_nothing_here_asks_the_device_for_a_number() -> None:
    """On a GPU, reading a value makes the host wait for all launched work.

    Tensors on torch's meta device have shapes and no values: code that needs a value fails.
    """
    stored(row0=50)
    futures = FutureMap(4, torch.device("meta"))
    ids = torch.zeros(1, 5, dtype=torch.int64, device="meta")
    try:
        shape = futures.resolve(ids).shape
        futures.store(ids[0, :2], ids[0, :2])
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(
            "resolve or store needs values on the host (a mask as an index, .item(), .tolist(), "
            f"an if): the host would wait for the step in flight. The error of torch: {error}"
        ) from error
    assert shape == (1, 5), "the ids of a step are [1, T]: resolve keeps their shape"


def test_a_decode_is_put_where_the_step_will_leave_it() -> None:
    """If the launch of N+1 fails, `step` is called again while N is in flight."""
    steps, (request,) = decoding("a")
    batch = plan(steps, request)
    for _ in range(2):
        steps.advance(batch)
        assert request.num_computed_tokens == 3, "I1: the step computes its third token, once"
        assert request.token_ids == [1, 2, 3, placeholder(request.row)], (
            "the step samples a fourth token; the row's placeholder stands for it"
        )


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4, 5, 6], computed=0)
    steps.advance(plan(steps, (request, 4)))
    assert (request.num_computed_tokens, request.token_ids) == (4, [1, 2, 3, 4, 5, 6]), (
        "I1: the step computes four of six prompt tokens: it samples none, so no placeholder"
    )


def test_a_name_is_that_of_the_row_and_not_of_the_place() -> None:
    """The batch has the requests in another order than their rows, as after a retraction."""
    steps, requests = decoding("abc")
    steps.advance(plan(steps, *reversed(requests)))
    names = [request.token_ids[-1] for request in requests]
    expected = [placeholder(request.row) for request in requests]
    assert max(names) < 0, "a placeholder is negative, that of row 0 too"
    assert names == expected, "I2: rows 2, 1, 0 are at places 0, 1, 2 of the batch"


def test_a_name_leads_to_the_token_that_the_step_stores() -> None:
    """The host's placeholder and the device's map agree: they name the same token."""
    steps, requests = decoding("abc")
    steps.advance(plan(steps, *requests))
    futures = FutureMap(4, CPU)
    rows = torch.tensor([future_index(request.row) for request in requests])
    futures.store(rows, torch.tensor([30, 31, 32]))
    next_step = torch.tensor([[request.token_ids[-1] for request in reversed(requests)]])
    assert futures.resolve(next_step).tolist() == [[32, 31, 30]], (
        "I2: the next step has another order of requests; a placeholder names a row, not a place"
    )


def test_a_request_that_has_ended_is_left_as_it_is() -> None:
    """A request may end, or be aborted, when this step is already in flight."""
    steps, (ended, lives) = decoding("ab")
    batch = plan(steps, ended, lives)
    ended.finish_reason = "stop"
    steps.advance(batch)
    assert (ended.num_computed_tokens, ended.token_ids) == (2, [1, 2, 3]), (
        "its final output has been returned: no token may follow"
    )
    assert lives.num_tokens == 4, "the other request goes on"
