"""The handouts show one step of each milestone with all its values, as the engines run it now."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from common import EngineConfig
from milestones.chain import course_place, short
from milestones.staff.maintain import one_step, step_table
from milestones.staff.maintain.step_table import RecordedStep
from tests.conftest import MILESTONES, ROOT, shared_model

START, END = f"<!-- {one_step.BLOCK} -->\n", f"\n<!-- /{one_step.BLOCK} -->"


def shown(milestone: str) -> str:
    """Return the block of a handout, which is folded, after what is said about it."""
    text = (ROOT / course_place(milestone) / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    said, _, summary = before.rpartition("\n\n<details><summary>")
    number = one_step.STEPS[milestone]
    assert summary.startswith(f"Step {number}: ")
    assert f"### One step, with all its values\n\nThis is step {number} of " in said
    block, _, after = rest.partition(END)
    assert after.startswith("\n\n</details>\n")
    return block


@cache
def recorded(milestone: str) -> RecordedStep:
    return one_step.record(milestone, shared_model(EngineConfig().model))


def deck_steps(milestone: str) -> list[Any]:
    """Return what the decks show of each call of `step`. One of m5 launches the next step."""
    path = ROOT / f"slides/data/{short(milestone)}.json"
    runs = json.loads(path.read_text(encoding="utf-8"))
    steps: list[Any] = runs[f"{short(milestone)}_example"]["steps"]
    return steps


def changes(milestone: str, request: str, what: str) -> list[int | None]:
    return [getattr(moment[request], what) for moment in recorded(milestone).progress]


def test_each_milestone_has_its_step() -> None:
    assert [*one_step.STEPS] == MILESTONES


@pytest.mark.parametrize("name", MILESTONES)
def test_the_handout_shows_the_step_of_today(name: str) -> None:
    """The tokens are the same on every machine, so the block is equal character for character."""
    block = "\n".join(one_step.laid_out(recorded(name)))
    assert shown(name) == block, "run python -m milestones.staff.maintain.one_step"


@pytest.mark.parametrize("name", MILESTONES)
def test_the_step_is_that_of_the_deck(name: str) -> None:
    """The figures of the decks show the same requests in the same batches, with the same text."""
    steps = deck_steps(name)
    batches = [batch for step in steps for batch in step["batches"]]
    step, number = recorded(name), one_step.STEPS[name]
    batch = dict(zip(step.batch, step.num_scheduled_tokens, strict=True))
    assert batches[number - 1] == batch
    for request, output in step.outputs.items():
        assert steps[number - 1]["requests"][request]["text"] == output.outputs[0].text
    newest = {request: output.outputs[0].token_ids[-1] for request, output in step.outputs.items()}
    sampled = [token for token, _ in step.sampled]
    assert newest == dict(zip(step.sampled_requests(), sampled, strict=True))


def test_something_of_the_lesson_happens_in_each_step() -> None:
    """What the handouts say about the steps."""
    m1, m2, m3, m4, m5 = map(recorded, MILESTONES)
    assert m1.batch == ["A"] and m1.tensors["position_ids"] == [[m1.cached]]
    assert all(m1.progress[2][name].queue == "waiting" for name in "BC")
    assert m2.batch == ["A", "B"] and m2.progress[2]["C"].queue == "waiting"
    assert changes("m2_continuous", "B", "row") == [1, 1, None]
    assert m2.outputs["B"].outputs[0].finish_reason == "stop"
    assert [m3.num_scheduled_tokens, m3.sampled_requests()] == [[1, 7], ["A"]]
    assert "C" not in m3.outputs and m3.tensors["page_table"][1][:4] == [6, 7, 8, 10]
    assert changes("m4_radix", "C", "num_computed_tokens") == [0, 6, 12]
    assert m4.tensors["page_table"][1][:3] == [6, 7, 8] and "C" in m4.outputs
    assert m5.tensors["input_ids"] == [[-1, -2]]
    assert m5.tensors["resolved"] == [[t for (t,) in m2.tensors["input_ids"]]]
    assert m5.outputs["B"].finished and changes("m5_overlap", "B", "row") == [1, 1, 1]


def test_the_other_steps_are_as_the_handouts_say() -> None:
    """B had pages 6, 7 and 8 before C has them. In m3, C gets its first token one step later."""
    m3, m4, m5 = (deck_steps(name) for name in MILESTONES[2:])
    assert m3[1]["tables"]["B"] == m4[1]["tables"]["B"] == [6, 7, 8]
    assert ["C" in step["said"] for step in m3[3:5]] == [False, True]
    assert m5[2]["batches"] == [{"A": 1, "B": 1}], "step 4, which step 3 overlaps"


@pytest.mark.parametrize("name", MILESTONES)
def test_another_step_is_another_block(name: str) -> None:
    """Each value that a forward gets is in the block, so a wrong one changes it."""
    step = recorded(name)
    for tensor in step.tensors.keys() - {"attention_mask"}:
        wrong = json.loads(json.dumps(step.tensors[tensor]), parse_int=lambda n: int(n) + 1)
        other = replace(step, tensors={**step.tensors, tensor: wrong})
        assert one_step.laid_out(other) != one_step.laid_out(step), tensor


def test_a_block_that_does_not_fit_is_refused() -> None:
    step = recorded("m3_paged")
    prompts = {**step.prompts, "A": 3 * step.prompts["C"]}
    with pytest.raises(ValueError, match=r"25 lines of \d+ columns"):
        step_table.lines_of(replace(step, prompts=prompts))
