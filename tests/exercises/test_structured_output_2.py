"""structured_output.2: the forward does not wait for tokens, and the sampling waits for masks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from common.engine_core import ForwardError
from milestones.electives.structured_output import engine as engine_module
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.exercises.by_hand import watch
from tests.helpers.fake_grammars import (
    MaskRunner,
    StepGrammar,
    expected_under,
    structured,
    with_fakes,
)
from tests.helpers.fake_overlap import expected_output, hash_engine
from tests.helpers.oracle import drain, greedy

PROMPT = [3, 1, 4]


def made(late: bool = True, **config: Any) -> Any:
    """Return an engine with compiled grammars, and the list of what it has launched and taken."""
    stream = LateStream() if late else EarlyStream()
    engine = hash_engine(engine_module, stream, 60, MaskRunner, page_size=2, **config)
    vars(engine)["grammars"] = with_fakes(engine)
    vars(engine)["events"] = events = list[str]()
    watch(engine.core.runner, "launch", lambda *_: events.append("launch"))
    watch(engine.core.runner, "sample", lambda *_: events.append("sample"))
    watch(engine.core.scheduler.grammars, "accept", lambda *_: events.append("accept"))
    return engine


def add(engine: Any, name: str, salt: int, length: int, prompt: list[int] | None = None) -> None:
    params = greedy(20, structured_outputs=structured(salt, length))
    engine.add_request(prompt or PROMPT, params, name)


def tokens_of(engine: Any) -> dict[str, list[int]]:
    return {name: found[-1].outputs[0].token_ids for name, found in drain(engine).items()}


def test_the_forward_is_launched_first_and_sampled_last() -> None:
    """Launch N+1, take the tokens of N, sample N+1. The first step has nothing to wait for."""
    engine = made()
    add(engine, "a", 1, 3)
    tokens = tokens_of(engine)
    expected = ["launch", "sample", *["launch", "accept", "sample"] * 3, "launch", "accept"]
    assert engine.events == expected, "four tokens, and a step in vain"
    assert tokens["a"] == expected_under(PROMPT, 20, 1, 3), "I1: a mask was early or late"


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_masks_reach_their_own_rows(late: bool, overlap: bool) -> None:
    """I2: plain, grammar, plain, grammar. No request changes its neighbours."""
    engine = made(late, enable_overlap=overlap)
    for i in range(4):
        if i % 2:
            add(engine, f"r{i}", i, 3 * i, [i, 5])
        else:
            engine.add_request([i, 5], greedy(12, ignore_eos=True), f"r{i}")
    tokens = tokens_of(engine)
    for i in range(4):
        expected = (
            expected_under([i, 5], 20, i, 3 * i) if i % 2 else expected_output([i, 5], 12, [], "")
        )
        assert tokens[f"r{i}"] == expected, f"I2: row {i} got the mask of another row"


def test_masks_are_for_the_requests_that_are_sampled() -> None:
    """I2: a chunk of a prompt is in the step, too, and it gets no token."""
    engine = made(max_num_batched_tokens=6)
    wrong: list[str] = []

    def check(result: Any, rows: Any, _bits: Any) -> None:
        if max(rows.tolist(), default=0) >= len(result.places):
            wrong.append(f"row {max(rows.tolist())} of {len(result.places)}")

    watch(engine.core.runner, "sample", check)
    add(engine, "a", 1, 12)
    engine.step()
    add(engine, "long", 2, 2, [token % 50 for token in range(30)])
    engine.add_request([9], greedy(6, ignore_eos=True), "plain")
    tokens = tokens_of(engine)
    assert wrong == [], "I2: a mask for a request that gets no token"
    assert tokens["a"] == expected_under(PROMPT, 20, 1, 12), "I2: a mask is in the wrong row"
    assert tokens["long"] == expected_under([token % 50 for token in range(30)], 20, 2, 2)
    assert tokens["plain"] == expected_output([9], 6, [], "")


def test_a_step_without_grammars_is_not_delayed() -> None:
    engine = made()
    engine.add_request(PROMPT, greedy(5, ignore_eos=True), "plain")
    tokens = tokens_of(engine)
    assert "sample" not in engine.events, "a plain step is sampled with its forward, as in m5"
    assert tokens["plain"] == expected_output(PROMPT, 5, [], "")


def test_a_first_token_awaits_no_other() -> None:
    """The step in flight samples no token of this request: its mask is known at the launch."""
    engine = made()
    engine.add_request([8, 8], greedy(20, ignore_eos=True), "plain")
    engine.step()
    add(engine, "a", 1, 3)
    engine.events.clear()
    engine.step()
    assert engine.events == ["launch", "sample", "accept"], f"the order is {engine.events}"
    [batch] = engine.core.scheduler.in_flight.batches
    awaits_tokens = engine.core.scheduler.grammars.awaits_tokens
    assert not awaits_tokens(batch.sampled_requests), "no token of the request is a placeholder"


def test_a_placeholder_is_awaited() -> None:
    engine = made(enable_overlap=False)
    add(engine, "a", 1, 3)
    add(engine, "b", 2, 3, [7, 7])
    engine.step()
    batch = engine.core.scheduler.schedule()
    awaits_tokens = engine.core.scheduler.grammars.awaits_tokens
    assert not awaits_tokens(batch.requests), "all tokens are known"
    batch.requests[0].token_ids.append(-1)
    assert awaits_tokens(batch.requests), (
        "I2: the grammar of one request has not seen its newest token; that of the other one has"
    )
    batch.requests[0].token_ids.pop()
    engine.core.scheduler.undo(batch)
    tokens_of(engine)


def test_masks_that_fail_undo_their_step() -> None:
    """I3: as if the forward had failed. The requests go on."""
    engine = made()
    add(engine, "a", 1, 3)
    engine.step()
    with patch.object(engine.core.scheduler.grammars, "masks", side_effect=MemoryError):
        try:
            engine.core.step()
        except ForwardError:
            pass
        except MemoryError as error:
            raise AssertionError(
                "I3: the masks of a step failed, and their error leaves `step` as it is, with the "
                "step in flight: `undoing_failures` undoes it, and raises a `ForwardError`"
            ) from error
    engine.check_invariants()
    assert tokens_of(engine)["a"] == expected_under(PROMPT, 20, 1, 3), "I1: the request goes on"


def test_a_token_that_is_not_allowed_ends_its_request() -> None:
    """The others keep their tokens."""
    engine = made()
    for i in range(3):
        add(engine, f"r{i}", i, 10, [i, 9])
    for _ in range(4):
        engine.step()
    [grammar] = [
        g for r, g in engine.core.scheduler.grammars.grammars.items() if r.request_id == "r1"
    ]
    grammar.length = len(grammar.accepted) + 1  # now only the end is allowed at its next place
    grammar.fill = StepGrammar(1, 10).fill  # ... but its masks are those of its beginning
    outputs = {name: found[-1].outputs[0] for name, found in drain(engine).items()}
    reason = outputs["r1"].finish_reason
    assert reason == "error", f"its grammar refuses the token, and it ends with {reason}"
    for i in (0, 2):
        assert outputs[f"r{i}"].token_ids == expected_under([i, 9], 20, i, 10)


def test_a_request_without_a_token_says_why() -> None:
    """A row without a valid token: the reason is that of a request with a grammar."""
    engine = made()
    add(engine, "a", 1, 3)
    engine.step()
    manager = engine.core.scheduler.grammars
    [request] = manager.grammars
    assert manager.accept(request, None), "no token is left, so the request must end"
    engine.add_request([1], greedy(2, ignore_eos=True), "plain")
    [plain] = engine.output_processor.find("plain")
    assert manager.accept(plain, 5) is None, "a request without a grammar takes any token"
    assert manager.accept(plain, None) is None, "the engine has a reason of its own for it"
    tokens_of(engine)
