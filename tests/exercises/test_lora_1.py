"""lora.1: which adapters have slots, and which one leaves its slot for another."""

from __future__ import annotations

from milestones.electives.lora.adapter_slots import AdapterSlots
from milestones.electives.lora.adapters import BASE, Adapter
from tests.exercises.by_hand import make_request

NAMES = "ABCDE"


def make_slots(num_slots: int) -> tuple[AdapterSlots, dict[str, Adapter]]:
    """Return empty slots, and adapters A to E by name. No request runs."""
    adapters = {name: Adapter(name, "", i, {}) for i, name in enumerate(NAMES, start=1)}
    return AdapterSlots(num_slots, []), adapters


def run(slots: AdapterSlots, adapter: Adapter | None, tokens_left: int = 5) -> None:
    """Let a request with this adapter run. It may generate that many more tokens."""
    request = make_request(f"r{len(slots.running)}", [1, 2], max_tokens=max(1, tokens_left))
    request.adapter = adapter
    if tokens_left == 0:
        request.token_ids.append(-1)  # a placeholder: its last token is being computed
    slots.running.append(request)


def resident(slots: AdapterSlots) -> str:
    """Return the names of the adapters with a slot, the least recently used one first."""
    slots.check_invariants()
    return "".join(adapter.name for adapter in slots.resident)


def loaded(slots: AdapterSlots) -> list[tuple[int, str]]:
    return [(load.slot, load.adapter.name) for load in slots.loads]


def test_the_base_needs_no_slot() -> None:
    slots, adapters = make_slots(1)
    run(slots, adapters["A"])
    assert slots.can_use(None), "a request without an adapter may always join"
    assert slots.use(None) == BASE, "slot 0 is the model without an adapter"
    assert resident(slots) == "", "nothing is loaded for it"


def test_an_adapter_is_loaded_once() -> None:
    slots, adapters = make_slots(2)
    assert [slots.use(adapters["A"]) for _ in range(3)] == [1, 1, 1], "the slot stays the same"
    assert loaded(slots) == [(1, "A")], "one load for three uses"
    assert slots.num_loads == 1, "num_loads counts one load, for three uses"


def test_a_step_may_begin_with_several_loads() -> None:
    slots, adapters = make_slots(2)
    slots.use(adapters["A"])
    slots.use(adapters["B"])
    assert loaded(slots) == [(1, "A"), (2, "B")], (
        "A and B have slots of their own: both must be written before the step reads them"
    )


def test_the_least_recently_used_adapter_leaves() -> None:
    slots, adapters = make_slots(2)
    for name in "ABA":
        slots.use(adapters[name])
    assert resident(slots) == "BA", "a use makes an adapter the most recently used one"
    assert slots.use(adapters["C"]) == 2, "C gets the slot of B"
    assert resident(slots) == "AC", "A was used after B"


def test_an_adapter_in_use_stays() -> None:
    """A is the least recently used one, but a request with it goes on."""
    slots, adapters = make_slots(2)
    run(slots, adapters["A"])
    for name in "AB":
        slots.use(adapters[name])
    slots.use(adapters["C"])
    assert resident(slots) == "AC", "B has no request, so B leaves"


def test_a_request_that_ends_in_this_step_needs_no_slot() -> None:
    """Its last token is being computed. The next step may load another adapter."""
    slots, adapters = make_slots(1)
    run(slots, adapters["A"], tokens_left=0)
    slots.use(adapters["A"])
    assert slots.can_use(adapters["B"]), "the request of A takes no part in the next step"
    assert slots.use(adapters["B"]) == 1, "B gets its slot"


def test_how_many_adapters_may_run() -> None:
    slots, adapters = make_slots(2)
    run(slots, adapters["A"])
    run(slots, adapters["A"])
    assert slots.can_use(adapters["B"]), "two requests use one adapter"
    run(slots, adapters["B"])
    assert not slots.can_use(adapters["C"]), "both slots are in use"
    assert slots.can_use(adapters["A"]), "an adapter in use needs no other slot"


def test_a_later_load_of_a_slot_replaces_the_earlier_one() -> None:
    slots, adapters = make_slots(1)
    slots.use(adapters["A"])
    slots.use(adapters["B"])
    assert loaded(slots) == [(1, "B")], "no step will read A"
    assert slots.num_loads == 2, "both were counted"
