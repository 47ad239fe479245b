"""m5.2: a step is planned with names for tokens that nobody knows yet."""

from __future__ import annotations

import torch

from m5_overlap.future_map import PADDING_INDEX, FutureMap, index_of, placeholder
from tests.exercises.overlap_states import plan, running, steps_in_flight

CPU = torch.device("cpu")


def stored(**tokens_by_row: int) -> FutureMap:
    """A map of four rows, in which some have stored a token: `stored(row0=50)`."""
    futures = FutureMap(4, CPU)
    rows = [index_of(int(name.removeprefix("row"))) for name in tokens_by_row]
    futures.store(torch.tensor(rows), torch.tensor(list(tokens_by_row.values())))
    return futures


def test_a_placeholder_becomes_the_token_of_its_row() -> None:
    futures = stored(row2=70, row0=50)
    ids = torch.tensor([[placeholder(0), placeholder(2)]])
    got = futures.resolve(ids).tolist()
    assert got == [[50, 70]], f"row 0 stored 50, row 2 stored 70: {ids.tolist()} became {got}"


def test_tokens_stay_what_they_are() -> None:
    """Token 0 is a token, whatever padding has stored. So is one larger than the map."""
    futures = stored(row0=50, row1=60)
    futures.store(torch.tensor([0]), torch.tensor([77]))
    ids = torch.tensor([[0, 1, 2, 49_151]])
    got = futures.resolve(ids).tolist()
    assert got == ids.tolist(), f"I1: no number here is negative, none may change: {got}"


def test_both_kinds_in_one_step() -> None:
    """A step holds decodes, which begin with futures, and chunks of prompts, which do not."""
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
    """A request may pause for steps (no room, a chunk first). Its token must still be there."""
    futures = stored(row3=80)
    for token in range(20):
        futures.store(torch.tensor([index_of(0)]), torch.tensor([token]))
    got = futures.resolve(torch.tensor([placeholder(3), placeholder(0)])).tolist()
    assert got == [80, 19], f"row 3 has stored 80 and nothing since; row 0 last stored 19: {got}"


def test_padding_is_nobodys_future() -> None:
    """Rows of a batch that belong to no request all store in one place."""
    futures = stored(row0=50, row1=60)
    indices = torch.tensor([index_of(0), PADDING_INDEX, PADDING_INDEX])
    futures.store(indices, torch.tensor([51, 98, 99]))
    got = futures.resolve(torch.tensor([placeholder(0), placeholder(1)])).tolist()
    assert got == [51, 60], f"row 0 stored 51, row 1 still has 60: {got}"


def test_nothing_here_asks_the_device_for_a_number() -> None:
    """On a GPU, a look at a value makes the host wait for all that was launched.

    On torch's meta device tensors have shapes and no values: what needs one, fails.
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
            f"an if): the host would wait for the step in flight. torch says: {error}"
        ) from error
    assert shape == (1, 5)


def test_a_decode_is_put_where_the_step_will_leave_it() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4], computed=3)
    batch = plan(steps, (request, 1))
    steps.advance(batch)
    assert request.num_computed_tokens == 4, "its fourth token will be computed by then"
    assert request.token_ids == [1, 2, 3, 4, placeholder(request.row)], (
        f"and a fifth one sampled, which goes by its row's name until it is known: "
        f"{request.token_ids}"
    )


def test_a_chunk_that_does_not_reach_the_end_samples_nothing() -> None:
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3, 4, 5, 6], computed=0)
    steps.advance(plan(steps, (request, 4)))
    assert (request.num_computed_tokens, request.token_ids) == (4, [1, 2, 3, 4, 5, 6]), (
        "I1: four of six prompt tokens: no token comes of this step, and no placeholder for one"
    )


def test_each_request_gets_its_own_name() -> None:
    steps = steps_in_flight()
    requests = [running(steps, name, [i, i, i], computed=2) for i, name in enumerate("abc")]
    steps.advance(plan(steps, *((request, 1) for request in requests)))
    names = [request.token_ids[-1] for request in requests]
    assert len(set(names)) == 3 and max(names) < 0, (
        f"three rows, three names, and all negative, row 0's too: {names}"
    )


def test_a_name_leads_to_the_token_that_the_step_stores() -> None:
    """Through both halves: the host's placeholder, the device's map."""
    steps = steps_in_flight()
    requests = [running(steps, name, [i, i, i], computed=2) for i, name in enumerate("abc")]
    steps.advance(plan(steps, *((request, 1) for request in requests)))
    futures = FutureMap(4, CPU)
    rows = torch.tensor([index_of(request.row) for request in requests])
    futures.store(rows, torch.tensor([30, 31, 32]))
    next_step = torch.tensor([[request.token_ids[-1] for request in reversed(requests)]])
    assert futures.resolve(next_step).tolist() == [[32, 31, 30]], (
        "I2: the next step lists the requests in another order; names go by row, not by place"
    )


def test_a_step_is_advanced_once() -> None:
    """If the launch of N+1 fails, `step` is called again while N is still in flight."""
    steps = steps_in_flight()
    request = running(steps, "a", [1, 2, 3], computed=2)
    batch = plan(steps, (request, 1))
    steps.advance(batch)
    steps.advance(batch)
    assert (request.num_computed_tokens, request.num_tokens) == (3, 4), (
        "I1: the same step was advanced twice, and it computes its tokens once: "
        f"{request.num_computed_tokens} computed of {request.num_tokens}"
    )


def test_who_has_ended_is_left_as_it_is() -> None:
    """It ended, or was aborted, when this step was in flight already."""
    steps = steps_in_flight()
    ended, lives = (running(steps, name, [i, i, i], computed=2) for i, name in enumerate("ab"))
    batch = plan(steps, (ended, 1), (lives, 1))
    ended.finish_reason = "stop"
    steps.advance(batch)
    assert (ended.num_computed_tokens, ended.token_ids) == (2, [0, 0, 0]), (
        "its final output is given: no token comes after it"
    )
    assert lives.num_tokens == 4, "the other one goes on"
