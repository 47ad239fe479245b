"""m2.1: rows without holes. `KVCacheManager.allocate` and `free`, plain data."""

from __future__ import annotations

import random

import pytest

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


def test_requests_get_the_first_free_rows_in_order() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6})
    assert names(manager.rows) == "A B C", "I3: A, B and C get rows 0, 1 and 2"
    rows = {name: request.row for name, request in requests.items()}
    assert rows == {"A": 0, "B": 1, "C": 2}, "I3: each request has its row"


@pytest.mark.parametrize(
    ("leaves", "rows", "moves"),
    [("B", "A D C", [(3, 1, 7)]), ("A", "D B C", [(3, 0, 7)]), ("D", "A B C", [])],
)
def test_the_last_row_moves_into_the_hole(leaves: str, rows: str, moves: list[object]) -> None:
    """D has 8 tokens. Between two steps the newest of them is not in the cache: 7 are moved."""
    manager, requests = filled({"A": 4, "B": 5, "C": 6, "D": 7})
    requests["D"].token_ids.append(99)
    manager.free(requests[leaves])
    assert names(manager.rows) == rows, f"I3: {leaves} ended: the last row, D's, fills a hole"
    assert [tuple(move) for move in manager.moves] == moves, (
        "`moves` tells the runner to copy D's keys and values: source, target, number of tokens"
    )


def test_a_moved_request_knows_its_new_row() -> None:
    manager, requests = filled({"A": 4, "B": 5, "C": 6, "D": 7})
    manager.free(requests["B"])
    rows = {name: requests[name].row for name in "ACD"}
    assert rows == {"A": 0, "D": 1, "C": 2}, "I3: D was moved to row 1"


def test_two_requests_may_end_in_one_step() -> None:
    """The runner makes the moves before the next forward: until then, all of them are kept."""
    manager, requests = filled({"A": 4, "B": 5, "C": 6, "D": 7})
    manager.free(requests["B"])
    manager.free(requests["A"])
    assert [tuple(move) for move in manager.moves] == [(3, 1, 7), (2, 0, 6)], (
        "I2: B ends, and D's 7 tokens move from row 3 to 1; then A ends, and C's 6 from row 2 to 0"
    )


def test_a_request_that_leaves_has_no_row() -> None:
    manager, requests = filled({"A": 4, "B": 5})
    for name in "AB":
        manager.free(requests[name])
        assert requests[name].row is None, f"I3: {name} gave its row back"
    assert manager.rows == [] and manager.num_reserved_tokens == 0, "I3: all rows are free"


def test_a_freed_row_is_given_out_again() -> None:
    manager, requests = filled({"A": 4, "B": 5}, num_rows=2)
    assert not manager.has_free_row, "both rows are taken"
    manager.free(requests["A"])
    assert manager.has_free_row, "A has left: a row must be free"
    newcomer = make_request("N", 3)
    manager.allocate(newcomer)
    assert (names(manager.rows), newcomer.row) == ("B N", 1), "I3: B moved to row 0; N gets row 1"


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
