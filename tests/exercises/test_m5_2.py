"""m5.2: a step is planned with placeholders for tokens that the host does not know yet."""

from __future__ import annotations

import torch

from m5_overlap.future_map import FutureMap
from m5_overlap.placeholders import PADDING_INDEX, future_index, placeholder
from tests.exercises.overlap_states import plan, running, steps_in_flight

CPU = torch.device("cpu")


def stored(**tokens_by_row: int) -> FutureMap:
    """Return a map of four rows; some of them have stored a token: `stored(row0=50)`."""
    futures = FutureMap(4, CPU)
    rows = [future_index(int(name.removeprefix("row"))) for name in tokens_by_row]
    futures.store(torch.tensor(rows), torch.tensor(list(tokens_by_row.values())))
    return futures


def test_a_placeholder_becomes_the_token_of_its_row() -> None:
    futures = stored(row2=70, row0=50)
    ids = torch.tensor([[placeholder(0), placeholder(2)]])
    got = futures.resolve(ids).tolist()
    assert got == [[50, 70]], f"row 0 stored 50, row 2 stored 70: {ids.tolist()} became {got}"


def test_tokens_stay_what_they_are() -> None:
    """0 is a token, whatever padding has stored, and so is an id that is larger than the map."""
    futures = stored(row0=50, row1=60)
    futures.store(torch.tensor([0]), torch.tensor([77]))
    ids = torch.tensor([[0, 1, 2, 49_151]])
    got = futures.resolve(ids).tolist()
    assert got == ids.tolist(), "I1: none of these ids is negative, so none may change"


def test_both_kinds_in_one_step() -> None:
    """A step has decodes, which begin with placeholders, and chunks of prompts, which do not."""
    futures = stored(row1=60)
    got = futures.resolve(torch.tensor([[placeholder(1), 7, 0, 8]])).tolist()
    assert got == [[60, 7, 0, 8]]


def test_any_shape() -> None:
    futures = stored(row0=50)
    for ids in (
        torch.tensor([-1]),
        torch.tensor([[-1], [3]]),
        torch.empty(1, 0, dtype=torch.int64),
    ):
        got = futures.resolve(ids)
        assert got.shape == ids.shape and got.dtype == torch.int64


def test_a_future_stays_until_its_row_stores_again() -> None:
    """A request may pause for some steps, for lack of room. Its token must still be in the map."""
    futures = stored(row3=80)
    for token in range(20):
        futures.store(torch.tensor([future_index(0)]), torch.tensor([token]))
    got = futures.resolve(torch.tensor([placeholder(3), placeholder(0)])).tolist()
    assert got == [80, 19], "row 3 stored 80 and nothing after that; row 0 last stored 19"


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
    assert shape == (1, 5)


def test_a_decode_is_put_where_the_step_will_leave_it() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4], computed=3)
    batch = plan(steps, (request, 1))
    steps.advance(batch)
    assert request.num_computed_tokens == 4, "the step computes its fourth token"
    assert request.token_ids == [1, 2, 3, 4, placeholder(request.row)], (
        "the step samples a fifth token; the row's placeholder stands for it"
    )


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4, 5, 6], computed=0)
    steps.advance(plan(steps, (request, 4)))
    assert (request.num_computed_tokens, request.token_ids) == (4, [1, 2, 3, 4, 5, 6]), (
        "I1: the step computes four of six prompt tokens: it samples none, so no placeholder"
    )


def test_each_request_gets_its_own_name() -> None:
    steps = steps_in_flight()
    requests = [running(steps, name, [i, i, i], computed=2) for i, name in enumerate("abc")]
    steps.advance(plan(steps, *((request, 1) for request in requests)))
    names = [request.token_ids[-1] for request in requests]
    assert len(set(names)) == 3 and max(names) < 0, (
        f"three rows have three placeholders, all negative, that of row 0 too: {names}"
    )


def test_a_name_is_that_of_the_row_and_not_of_the_place() -> None:
    """The batch has the requests in another order than their rows, as after a retraction."""
    steps = steps_in_flight()
    requests = [running(steps, name, [i, i, i], computed=2) for i, name in enumerate("abc")]
    steps.advance(plan(steps, *((request, 1) for request in reversed(requests))))
    got = {request.row: request.token_ids[-1] for request in requests}
    expected = {request.row: placeholder(request.row) for request in requests}
    assert got == expected, (
        f"I2: the requests in rows 2, 1, 0 are at places 0, 1, 2 of the batch; the placeholder of "
        f"each row must be {expected}, not {got}"
    )


def test_a_name_leads_to_the_token_that_the_step_stores() -> None:
    """The host's placeholder and the device's map agree: they name the same token."""
    steps = steps_in_flight()
    requests = [running(steps, name, [i, i, i], computed=2) for i, name in enumerate("abc")]
    steps.advance(plan(steps, *((request, 1) for request in requests)))
    futures = FutureMap(4, CPU)
    rows = torch.tensor([future_index(request.row) for request in requests])
    futures.store(rows, torch.tensor([30, 31, 32]))
    next_step = torch.tensor([[request.token_ids[-1] for request in reversed(requests)]])
    assert futures.resolve(next_step).tolist() == [[32, 31, 30]], (
        "I2: the next step has another order of requests; a placeholder names a row, not a place"
    )


def test_a_step_is_advanced_once() -> None:
    """If the launch of N+1 fails, `step` is called again while N is still in flight."""
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (request, 1))
    steps.advance(batch)
    steps.advance(batch)
    assert (request.num_computed_tokens, request.num_tokens) == (3, 4), (
        "I1: the step was advanced twice, but it computes its tokens only once: "
        f"{request.num_computed_tokens} computed of {request.num_tokens}"
    )


def test_a_request_that_has_ended_is_left_as_it_is() -> None:
    """A request may end, or be aborted, when this step is already in flight."""
    steps = steps_in_flight()
    ended, lives = (running(steps, name, [i, i, i], computed=2) for i, name in enumerate("ab"))
    batch = plan(steps, (ended, 1), (lives, 1))
    ended.finish_reason = "stop"
    steps.advance(batch)
    assert (ended.num_computed_tokens, ended.token_ids) == (2, [0, 0, 0]), (
        "its final output has been returned: no token may follow"
    )
    assert lives.num_tokens == 4, "the other request goes on"
