"""The handouts link to steps of recorded runs. The pages are built, and show what is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from common.tracing.player import page_of
from slides import build, facts, record
from slides.facts import RUN_PAGES
from tests.conftest import ROOT, shared_model

Json = dict[str, Any]
LINK = re.compile(r"\]\([./]*slides/dist/run_(\w+)\.html#step=(\d+)\)")


def trace(name: str) -> Json:
    found: Json = facts.data(f"run_{name}")["trace"]
    return found


def example(name: str, step: int) -> Json:
    """Return the state after a step, as the figures of the decks have it."""
    found: Json = facts.data(name)["steps"][step - 1]
    return found


def links() -> set[tuple[str, int]]:
    """Return the name and the step of each link in the pages of the course."""
    pages = (ROOT / "milestones").rglob("*.md")
    texts = [path.read_text(encoding="utf-8") for path in pages]
    return {(name, int(step)) for text in texts for name, step in LINK.findall(text)}


def state(name: str, step: int, request: str) -> str:
    return str(example(name, step)["requests"][request]["state"])


# What a handout says about a step: `(run, step): (words, whether it is so)`.
CLAIMS: dict[tuple[str, int], tuple[str, Callable[[], bool]]] = {
    ("m1_example", 5): ("A ends, and B and C still wait", lambda: (
        state("m1_example", 5, "A") == "length"
        and example("m1_example", 5)["waiting"] == ["B", "C"])),
    ("m1_example", 6): ("B computes the 5 tokens of its prompt", lambda: (
        example("m1_example", 6)["batches"] == [{"B": 5}])),
    ("m2_example", 1): ("A and B hold the two rows, and C waits", lambda: (
        example("m2_example", 1)["waiting"] == ["C"]
        and {r["row"] for n, r in example("m2_example", 1)["requests"].items() if n in "AB"}
        == {0, 1})),
    ("m2_example", 3): ("C computes all 12 tokens of its prompt", lambda: (
        state("m2_example", 3, "B") == "stop"
        and example("m2_example", 3)["batches"] == [{"C": 12}])),
    ("m3_retract", 8): ("no page is free", lambda: (
        example("m3_retract", 8)["stats"]["kv_pages_free"] == 0)),
    ("m3_retract", 9): ("A needs one, and C is retracted", lambda: (
        example("m3_retract", 9)["retracted"] == ["C"]
        and "A" in example("m3_retract", 9)["batches"][0])),
    ("m3_retract", 10): ("C computes its first 8 tokens again", lambda: (
        example("m3_retract", 10)["batches"] == [{"C": 8}])),
    ("m4_example", 3): ("B has ended, and its pages are in the tree", lambda: (
        state("m4_example", 3, "B") == "stop"
        and "is Paris" in {n["text"].strip() for n in example("m4_example", 3)["nodes"].values()})),
    ("m4_example", 4): ("computes only 6 of its 12 tokens", lambda: (
        example("m4_example", 4)["batches"][0]["C"] == 6
        and example("m4_example", 4)["requests"]["C"]["cached"] == 6)),
    ("m5_example", 3): ("so B still holds page 10", lambda: (
        state("m5_example", 3, "B") == "stop" and example("m5_example", 3)["pages"]["10"] == "B"
        and "B" in example("m5_example", 3)["batches"][0])),
    ("m5_example", 4): ("page 10 is no longer B's", lambda: (
        example("m5_example", 4)["pages"].get("10") != "B")),
}  # fmt: skip


def test_each_link_has_a_page_and_a_step() -> None:
    assert links() == CLAIMS.keys()
    assert {name for name, _ in links()} == {*RUN_PAGES}
    for name, step in links():
        assert step in [frame["step"] for frame in trace(name)["frames"]]


@pytest.mark.parametrize(("link", "claim"), CLAIMS.items())
def test_a_step_shows_what_the_handout_says(
    link: tuple[str, int], claim: tuple[str, Callable[[], bool]]
) -> None:
    words, holds = claim
    texts = [p.read_text(encoding="utf-8") for p in (ROOT / "milestones").rglob("README.md")]
    (text,) = (text for text in texts if f"run_{link[0]}.html" in text)
    assert words in " ".join(text.split()), "the handout has changed: change its claim too"
    assert holds()


@pytest.mark.parametrize("name", RUN_PAGES)
def test_a_page_is_of_the_run_that_the_figures_show(name: str) -> None:
    """The trace has the batches of the worked example. Another run gives the same frames."""
    frames = [frame for frame in trace(name)["frames"] if frame["step"] > 0]
    names = [request["request_id"] for request in trace(name)["requests"]]
    shown = [
        [{names[int(i)]: n for i, n in batch.items()} for batch in frame["batches"]]
        for frame in frames
    ]
    assert shown == [step["batches"] for step in facts.data(name)["steps"]]
    loaded = shared_model(record.EngineConfig().model)
    again = json.loads(json.dumps(record.run_page(f"run_{name}", loaded)))["trace"]
    assert [untimed(f) for f in again["frames"]] == [untimed(f) for f in trace(name)["frames"]]


def untimed(frame: Json) -> Json:
    return {key: value for key, value in frame.items() if key not in ("start", "end")}


def test_a_build_writes_the_pages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "OUTPUT", tmp_path)
    build.write_runs()
    for name in RUN_PAGES:
        text = (tmp_path / f"run_{name}.html").read_text(encoding="utf-8")
        assert text == page_of(trace(name))
        path = str(ROOT)
        assert path not in text, "no path of the machine is in a page"
