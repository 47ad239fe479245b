"""hybrid_memory.3: states are kept where a prefix can be resumed."""

from __future__ import annotations

import pytest

from common import Request
from milestones.electives.hybrid_memory.state_slots import StateSlots
from tests.exercises.by_hand import make_request

PAGE_SIZE, ROW = 4, 1


def make_slots(
    num_tokens: int, num_known: int = 0, num_snapshots: int = 3
) -> tuple[StateSlots, Request]:
    """Return the slots and a request in a row. The tree knows `num_known` blocks of its prompt."""
    slots, request = StateSlots(num_snapshots, PAGE_SIZE), make_request("a", range(num_tokens))
    request.row = ROW
    slots.start(request, [], num_known)
    slots.take_copies()
    return slots, request


def advance(slots: StateSlots, request: Request, num_tokens: int, block: int = 7) -> None:
    """Compute a request up to `num_tokens` tokens, the last of them in a block."""
    slots.advance(request, num_tokens, block)
    request.num_computed_tokens = num_tokens


def ends(slots: StateSlots, request: Request, budget: int) -> list[int]:
    """Return where the chunks of a prompt end in steps of at most `budget` tokens."""
    found: list[int] = []
    while request.num_uncomputed_tokens:
        end = request.num_computed_tokens + min(budget, request.num_uncomputed_tokens)
        found.append(slots.chunk_end(request, end))
        assert request.num_computed_tokens < found[-1] <= end, f"I5: each step computes: {found}"
        request.num_computed_tokens = found[-1]
    return found


def test_a_chunk_ends_with_a_block() -> None:
    assert ends(*make_slots(22), budget=7) == [4, 8, 12, 16, 20, 22], "the largest end of a block"


def test_a_prompt_leaves_a_state_that_it_can_be_resumed_from() -> None:
    assert ends(*make_slots(22), budget=99) == [20, 22], "a prompt with these tokens finds 20"


def test_the_last_token_is_computed_again() -> None:
    assert ends(*make_slots(20), budget=99) == [16, 20], "the same prompt cannot resume from 20"


def test_a_chunk_within_a_block_is_not_shortened() -> None:
    assert ends(*make_slots(9), budget=3) == [3, 4, 7, 8, 9], "there is an end after 4 and after 8"


def test_a_chunk_ends_where_the_tree_branches_off() -> None:
    assert ends(*make_slots(22, num_known=2), budget=99) == [8, 20, 22], "the tree knows 8 tokens"


def test_a_branch_that_is_computed_does_not_count() -> None:
    slots, request = make_slots(22, num_known=2)
    request.num_computed_tokens = 8
    assert ends(slots, request, budget=99) == [20, 22], "the state at 8 is there already"


@pytest.mark.parametrize(("num_tokens", "kept"), [(8, True), (9, False), (11, False), (12, True)])
def test_a_state_at_the_end_of_a_block_is_kept(num_tokens: int, kept: bool) -> None:
    slots, request = make_slots(22)
    advance(slots, request, num_tokens, block=5)
    assert list(slots.pages) == [5] * kept, "I1: a snapshot has all tokens of a block"
    copied = [(ROW, slot) for slot in slots.pages.values()]
    assert slots.saves == copied, "the step copies the row's state"


def test_each_snapshot_has_its_own_slot() -> None:
    slots, request = make_slots(22)
    advance(slots, request, 4, block=5)
    advance(slots, request, 8, block=6)
    slots.check_invariants([5, 6])
    assert [row for row, _slot in slots.saves] == [ROW, ROW], "both are copied"
    assert len(slots.free_slots) == 1, "I3: two of three slots are taken"


def test_without_a_free_slot_the_request_goes_on() -> None:
    slots, request = make_slots(22, num_snapshots=1)
    advance(slots, request, 4, block=5)
    advance(slots, request, 8, block=6)
    assert list(slots.pages) == [5], "I5: there is no snapshot at 8"
    assert slots.lengths[ROW] == 8, "its state has 8 tokens"


def test_an_undone_step_leaves_a_state_that_is_ahead() -> None:
    slots, request = make_slots(22)
    advance(slots, request, 6)
    assert not slots.is_ahead(request), "its state has the 6 tokens that are computed"
    slots.advance(request, 7, block=7)
    assert slots.is_ahead(request), "I1: if this step is undone, its state has a token too many"
