"""What the deck of the electives and the case of m4 say about their recorded runs is true.

`test_slides.py` runs the recorded runs again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from milestones.course import record
from slides import facts
from slides.figures import forwards_of
from slides.record_mistakes import M4_MUTANT, SPECULATIVE_MUTANT
from slides.sources import mutant_lines
from tests.conftest import ROOT
from tests.exercises import test_multi_step_1 as multi_step_1
from tests.exercises import test_speculative_1 as speculative_1
from tests.exercises.requests import request_of

Json = dict[str, Any]
Claims = list[tuple[str, Callable[[], Any]]]


def data(name: str) -> Json:
    found: Json = json.loads((facts.DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


CASE, PLANS, M5, LANES, VAIN, DRAFTS, MISTAKE = (
    data(name)
    for name in (
        "m4_mistake", "multi_step_example", "m5_example", "multi_step_lanes", "multi_step_vain",
        "speculative_drafts", "speculative_mistake",
    )
)  # fmt: skip
RIGHT, WRONG = CASE["right"], CASE["wrong"]
ROWS = [run["after_a"]["pages"][0] for run in (RIGHT, WRONG)]


def dropped(run: Json) -> int:
    """Return the tokens of B that are computed after the step in which its end is read."""
    states = [step["requests"]["B"]["state"] for step in run["steps"]]
    return sum("B" in batch for batch in forwards_of(run)[states.index("stop") + 1 :])


def gaps(run: Json) -> list[float]:
    return [b["start"] - a["end"] for a, b in pairwise(run["forward"])]


def planned() -> list[list[str]]:
    scheduler = multi_step_1.make_scheduler()
    multi_step_1.decoding(scheduler, request_of("a", [1, 2], 4), request_of("b", [3], 6))
    return multi_step_1.plan(scheduler)


def in_vain(name: str) -> int:
    return int(VAIN["runs"][name]["in_vain"])


def words_of(row: list[int]) -> list[str]:
    """Return the words in the pages of a row, as the right engine has written them."""
    size, words = CASE["page_size"], RIGHT["after_a"]["prompt"]
    said = {page: "".join(words[n * size : (n + 1) * size]) for n, page in enumerate(ROWS[0])}
    return [said[page] for page in row]


ELECTIVES: Claims = [
    ("there is one gap for eight forwards", lambda: (
        1 <= sum(gap > 0.5 for gap in gaps(LANES["multi_step"])) <= 2)),
    ("In m5 there is none", lambda: max(gaps(LANES["m5_overlap"])) < 0.5),
    ("Both pictures are recorded runs on one scale", lambda: (
        len(LANES["m5_overlap"]["forward"]) == len(LANES["multi_step"]["forward"]))),
    ("**Five steps and eight tokens.**", lambda: (
        (len(planned()), sum(map(len, planned()))) == (5, 8))),
    ("in which one token of B is dropped", lambda: dropped(M5) == 1),
    ("Here it is as many as the plan has steps left", lambda: dropped(PLANS) > 1),
    ("All engines return the same", lambda: (
        len({run["tokens"] for run in VAIN["runs"].values()}) == 1)),
    ("throws away one token instead of three or four", lambda: (
        3 <= in_vain("plans_of_8") / in_vain("m5_overlap") <= 4.5)),
    ("**9.** Both earlier places match", lambda: (
        speculative_1.propose([1, 2, 8, 1, 2, 9, 1, 2], 4, (2,)) == [9, 1, 2])),
    ("Every step appends at least one token", lambda: (
        min(step["appended"] for step in DRAFTS["steps"]) >= 1)),
    ("Up to the first difference, everything is right", lambda: all(
        step["own"][: step["appended"] - 1] == step["drafts"][: step["appended"] - 1]
        for step in DRAFTS["steps"])),
    ("Three tests of the exercise find it", lambda: len(record.find("speculative.2").red) == 3),
    ("Up to the first wrong draft they are equal", lambda: (
        MISTAKE["right"]["text"]["text"][:12] == MISTAKE["wrong"]["text"]["text"][:12]
        and MISTAKE["right"]["text"]["text"] != MISTAKE["wrong"]["text"]["text"])),
    ("another text", lambda: MISTAKE["mutant"] == SPECULATIVE_MUTANT),
]  # fmt: skip
M4_CASE: Claims = [
    ("The answer is wrong only if the tree has a prefix of B", lambda: (
        [name for name in WRONG if WRONG[name]["text"] != RIGHT[name]["text"]] == ["after_a"])),
    ("And an empty tree gives the right answer", lambda: (
        WRONG["after_reset"]["text"] == WRONG["alone"]["text"] == RIGHT["after_a"]["text"])),
    ("which is right", lambda: WRONG["on_m3"]["text"] == RIGHT["after_a"]["text"]),
    ("# The clue: the first token is right", lambda: (
        WRONG["after_a"]["first"] == RIGHT["after_a"]["first"])),
    ("B now reads the beginning of its prompt twice", lambda: (
        words_of(ROWS[1])[:3] == words_of(ROWS[1])[3:6] == words_of(ROWS[0])[:3])),
    ("and the end of its prompt not at all", lambda: (
        not set(words_of(ROWS[1])) & set(words_of(ROWS[0])[-3:]))),
    ("Two nodes of the tree now own the same page", lambda: len({*ROWS[1]}) < len(ROWS[1])),
    ("from a copy of the sources with one wrong line", lambda: (
        [line.kind for line in mutant_lines("m4_radix", M4_MUTANT)].count("add") == 1)),
    ("`test_of_a_longer_prefix_the_tree_takes_the_rest`", lambda: (
        killer("m4_radix", M4_MUTANT) == "test_of_a_longer_prefix_the_tree_takes_the_rest")),
]  # fmt: skip
CLAIMS = {"electives": ELECTIVES, "m4_radix": M4_CASE}


def killer(engine: str, name: str) -> str:
    (mutant,) = (m for m in record.mutants(engine, ROOT) if m.name == name)
    return mutant.killed_by.rpartition("::")[2]


@pytest.mark.parametrize(
    ("deck", "number"), [(deck, n) for deck, claims in CLAIMS.items() for n in range(len(claims))]
)
def test_what_a_deck_says_about_its_runs(deck: str, number: int) -> None:
    words, holds = CLAIMS[deck][number]
    text = (ROOT / "slides" / "decks" / f"{deck}.md").read_text(encoding="utf-8")
    assert words in " ".join(text.split()), f"the deck no longer says {words!r}: change its claim"
    assert holds(), f"{deck} says {words!r}, and that is not so"
