"""m2.1: rows without holes. `KVCacheManager.allocate` and `free`, plain data."""

from __future__ import annotations

import random

from common import Request
from m2_continuous.kv_cache import KVCacheManager
from tests.exercises.by_hand import make_request, names

ROW_TOKENS = 100


def filled(lengths: dict[str, int], num_rows: int = 4) -> tuple[KVCacheManager, dict[str, Request]]:
    """Return a manager, and requests in its rows, in order, with `lengths` computed tokens."""
    manager = KVCacheManager(num_rows, ROW_TOKENS)
    requests = {name: make_request(name, n, computed=n) for name, n in lengths.items()}
    for request in requests.values():
        manager.allocate(request)
    return manager, requests


def layout(manager: KVCacheManager) -> str:
    return f"rows: {names(manager.rows)}"


def test_requests_get_the_first_free_rows_in_order() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6})
    assert names(manager.rows) == "A B C", f"I3: A, B and C get rows 0, 1 and 2; {layout(manager)}"
    rows = {name: request.row for name, request in requests.items()}
    assert rows == {"A": 0, "B": 1, "C": 2}, f"I3: each request has its row; `row` is {rows}"


def test_the_last_row_moves_into_the_hole() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6, "D": 7})
    manager.free(requests["B"])
    assert names(manager.rows) == "A D C", (
        f"I3: rows were A B C D, and B ended: D, the last one, fills the hole; {layout(manager)}"
    )
    assert [tuple(move)[:2] for move in manager.moves] == [(3, 1)], (
        f"D's keys and values are in row 3: `moves` must tell the runner to copy them to row 1, "
        f"and it is {manager.moves}"
    )


def test_a_moved_request_knows_its_new_row() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6, "D": 7})
    manager.free(requests["B"])
    rows = {name: requests[name].row for name in "ACD"}
    assert rows == {"A": 0, "D": 1, "C": 2}, f"I3: D was moved to row 1; `row` is {rows}"


def test_a_request_that_leaves_has_no_row() -> None:
    manager, requests = filled({"A": 4, "B": 5})
    for name in "AB":
        manager.free(requests[name])
        assert requests[name].row is None, (
            f"I3: {name} gave its row back, and its `row` is still {requests[name].row}"
        )
    assert manager.rows == [] and manager.num_reserved_tokens == 0, f"I3: {layout(manager)}"


def test_a_move_carries_the_tokens_that_are_computed() -> None:
    """Between two steps the newest token of a request is not yet in the cache."""
    manager, requests = filled({"A": 4, "B": 5, "C": 6})
    requests["C"].token_ids.append(99)
    manager.free(requests["A"])
    (move,) = manager.moves
    assert move.num_tokens == 6, (
        f"C has 7 tokens, and 6 of them are computed: the move must copy the 6 in the cache, not "
        f"{move.num_tokens}"
    )


def test_the_last_row_leaves_no_hole() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6})
    manager.free(requests["C"])
    assert not manager.moves, f"C was in the last row: nothing moves, not {manager.moves}"
    assert names(manager.rows) == "A B", f"I3: {layout(manager)}"


def test_a_freed_row_is_given_out_again() -> None:
    manager, requests = filled({"A": 4, "B": 5}, num_rows=2)
    assert not manager.has_free_row, "both rows are taken"
    manager.free(requests["A"])
    assert manager.has_free_row, "A has left: a row must be free"
    newcomer = make_request("N", 3)
    manager.allocate(newcomer)
    assert (names(manager.rows), newcomer.row) == ("B N", 1), (
        f"I3: B moved to row 0, so N gets row 1, not {newcomer.row}; {layout(manager)}"
    )


def test_keys_and_values_follow_their_owner() -> None:
    """200 random allocations and frees, on a memory that stores the owner of each row's tokens."""
    chance = random.Random(2)
    manager, memory = KVCacheManager(5, ROW_TOKENS), [""] * 5
    for i in range(200):
        if manager.rows and (not manager.has_free_row or chance.random() < 0.5):
            manager.free(chance.choice(manager.rows))
            while manager.moves:
                move = manager.moves.pop(0)
                memory[move.target] = memory[move.source]
        else:
            request = make_request(f"r{i}", 3, computed=3)
            manager.allocate(request)
            memory[len(manager.rows) - 1] = request.request_id
        owners = [request.request_id for request in manager.rows]
        assert memory[: len(owners)] == owners, (
            f"I2: after {i + 1} steps the rows belong to {owners} and contain the tokens of "
            f"{memory[: len(owners)]}"
        )
        manager.check_invariants(list(manager.rows))
