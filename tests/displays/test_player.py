"""The player in a real browser, with the trace of a real run."""

from __future__ import annotations

import dataclasses
import functools
import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.tracing.chrome import chrome_trace
from common.tracing.data import Span, State, TraceData
from common.tracing.player import player_html, template
from common.tracing.trace import Trace
from milestones.chain import at_least
from tests.conftest import MILESTONES, build_engine
from tests.helpers.browser import Tab, tab
from tests.helpers.oracle import drain, greedy

COMMON = "You are </script><script>throw 1</script> <!-- a \u2028 tutor. "
QUESTIONS = ["What is a page?", "What is a tree?", "Why?", "What is a \u2029 cache?"]
CONFIG: dict[str, Any] = {"max_num_seqs": 2, "page_size": 4, "num_pages": 100}


@functools.cache
def trace_of(milestone: str) -> TraceData:
    engine = build_engine(milestone, **CONFIG)
    with Trace(engine) as trace:
        for number, question in enumerate(QUESTIONS):
            engine.add_request(COMMON + question, greedy(6, ignore_eos=True), f"r{number}")
        drain(engine)
    engine.close()
    return trace.data


@contextmanager
def played(folder: Path, page: str, where: str = "") -> Iterator[Tab]:
    """Open a player in the browser."""
    path = folder / "player.html"
    path.write_text(page, encoding="utf-8")
    with tab(folder, path.as_uri() + where) as opened:
        opened.wait_until("document.readyState === 'complete' && $('where').textContent")
        yield opened


def made_by(opened: Tab) -> str:
    """Return the page that the script has made, without its scripts and styles."""
    made: str = opened.evaluate("document.documentElement.outerHTML")
    return re.sub(r"<(script|style).*?</\1>", "", made, flags=re.DOTALL)


def dom(folder: Path, page: str, where: str = "") -> str:
    """Return the page that the browser has made of a player."""
    with played(folder, page, where) as opened:
        return made_by(opened)


def text_of(made: str, element: str) -> str:
    """Return the text of an element that contains no other element with the same tag."""
    found = re.search(rf'<(\w+)[^>]*id="{element}"[^>]*>(.*?)</\1>', made, re.DOTALL)
    assert found, element
    return html.unescape(re.sub(r"<[^>]*>", "", found[2])).strip()


def test_each_milestone_plays(milestone: str, tmp_path: Path) -> None:
    made = dom(tmp_path, player_html(trace_of(milestone)), "#step=2")
    assert text_of(made, "error") == ""
    assert text_of(made, "engine") == milestone
    assert text_of(made, "where").startswith("step 2 of")
    hidden = {name: bool(re.search(rf'id="{name}"[^>]*hidden', made)) for name in ("pages", "tree")}
    assert hidden == {
        "pages": not at_least(milestone, "m2_continuous"),
        "tree": not at_least(milestone, "m4_radix"),
    }


def test_a_step_is_shown_as_it_was(tmp_path: Path) -> None:
    """The page shows the last step with a queue: waiting and running requests, text, pages."""
    trace = trace_of(MILESTONES[-1])
    steps = [frame.step for frame, state in trace.states() if state.waiting]
    made = dom(tmp_path, player_html(trace), f"#step={steps[-1]}")
    assert text_of(made, "error") == ""
    state = State()
    for frame in trace.frames[: steps[-1] + 1]:
        state.apply(frame)
    assert text_of(made, "waiting-title").endswith(f": {len(state.waiting)}")
    for number in state.waiting:
        assert f"r{number}" in made[made.index('id="waiting"') : made.index('id="ended-title"')]
    running = made[made.index('id="running"') : made.index('id="waiting-title"')]
    shown = html.unescape(re.sub(r"<[^>]*>", "", running))
    for number, request in state.requests.items():
        if request["state"] in ("prefill", "decode"):
            assert f"r{number}" in shown
            assert " ".join(request["text"].split()) in " ".join(shown.split())
    owners = re.findall(r'title="page \d+: ([^"]*)"', made)
    for number, info in enumerate(trace.requests):
        assert owners.count(info.request_id) == list(state.pages.values()).count(number)
    shared = {number for number, request in state.requests.items() if request.get("node")}
    readers = [owner for owner in owners if owner.startswith("tree, in use: ")]
    names = {name for owner in readers for name in owner.partition(": ")[2].split(", ")}
    assert names == {f"r{number}" for number in shared}
    tree = sum(owner == "tree" for owner in state.pages.values())
    assert sum(owner.startswith("tree") for owner in owners) == tree
    assert made[made.index('id="nodes"') :].count('class="node ') == len(state.nodes)


def test_a_step_with_two_launches_keeps_both(tmp_path: Path) -> None:
    """A call of `step` with no forward in flight launches two. A request may be in both."""
    trace = trace_of(MILESTONES[-1])
    frame = next(frame for frame in trace.frames if len(frame.batches) == 2)
    first, second = frame.batches
    (both,) = [number for number in first if number in second][:1]
    made = dom(tmp_path, player_html(trace), f"#step={frame.step}")
    said = text_of(made, "says")
    assert " tokens in 2 forwards computed: " in said
    assert f"{first[both]}, then {second[both]} of r{both}" in said or second[both] == 1
    tokens = [
        event["args"]["tokens"]
        for event in chrome_trace(trace)["traceEvents"]
        if event["name"] == "schedule" and event["args"]["step"] == frame.step
    ]
    names = [{f"r{number}": count for number, count in batch.items()} for batch in (first, second)]
    assert tokens == names


def test_siblings_of_the_tree_are_told_apart(tmp_path: Path) -> None:
    """Two branches that begin with the same words are shown from the word that differs."""
    trace = trace_of(MILESTONES[-1])
    nodes: dict[int, dict[str, Any] | None] = {
        1: {"parent": 0, "locks": 0, "hits": 1, "pages": [1], "text": "You are a kind tutor"},
        2: {"parent": 0, "locks": 0, "hits": 1, "pages": [2], "text": "You are a kind judge"},
    }
    frame = dataclasses.replace(trace.frames[0], nodes=nodes)
    made = dom(tmp_path, player_html(dataclasses.replace(trace, frames=[frame])))
    assert "… tutor" in made and "… judge" in made
    assert 'title="You are a kind tutor"' in made and text_of(made, "error") == ""


def test_a_long_span_of_the_recording_has_a_readable_name(tmp_path: Path) -> None:
    """Its colour is that of a panel, so its name has the colour of other text."""
    data = trace_of(MILESTONES[0])
    long = Span("trace", data.frames[0].start, data.frames[-1].end, 3)
    made = dom(tmp_path, player_html(dataclasses.replace(data, spans=[long])), "#step=3")
    (kind,) = re.findall(r'<text class="(\w*)"[^>]*>trace</text>', made)
    assert kind != "on"


def test_a_hash_beyond_the_end(tmp_path: Path) -> None:
    trace = trace_of(MILESTONES[-1])
    last = trace.frames[-1].step
    made = dom(tmp_path, player_html(trace), "#step=99999")
    assert text_of(made, "where").startswith(f"step {last} of {last} ")
    assert "No request is running." in made and text_of(made, "error") == ""


def test_the_keys(tmp_path: Path) -> None:
    """Arrows, Home and End move by steps. The space key plays to the end and stops there."""
    trace = trace_of(MILESTONES[-1])
    last = trace.frames[-1].step
    with played(tmp_path, player_html(trace), "#step=1") as page:
        for keys, step in ((["ArrowRight", "ArrowRight", "ArrowLeft"], 2),
                           (["End", "ArrowLeft"], last - 1), (["Home"], 0)):  # fmt: skip
            for key in keys:
                page.press(key)
            page.wait_until(f"$('where').textContent.startsWith('step {step} of ')")
        page.evaluate("$('speed').value = '50'")
        page.press(" ")
        page.wait_until(f"$('where').textContent.startsWith('step {last} of ')")
        page.wait_until("$('play').title === 'Play (space)'")
        assert page.evaluate("$('error').textContent") == "" and page.errors == []


def test_the_page_opens_where_the_lesson_is(tmp_path: Path) -> None:
    """It says what to watch. The marks lead to the steps with events, and so do two keys."""
    trace = trace_of("m4_radix")
    hits = [
        frame.step
        for frame in trace.frames
        if any(change.get("cached") for change in frame.requests.values())
    ]
    with played(tmp_path, player_html(trace)) as page:
        page.wait_until(f"$('where').textContent.startsWith('step {hits[0]} of ')")
        assert page.evaluate("$('watch').textContent").startswith("Watch the tree: ")
        marks: list[str] = page.evaluate("[...$('marks').children].map(mark => mark.title)")
        assert all(any(f"step {step}:" in mark for mark in marks) for step in hits)
        assert " tokens in the tree." in " ".join(marks)
        page.press("n")
        after = int(page.evaluate("$('where').textContent").split()[1])
        assert after > hits[0] and any(f"step {after}:" in mark for mark in marks)
        page.press("p")
        page.wait_until(f"$('where').textContent.startsWith('step {hits[0]} of ')")
        page.evaluate("$('marks').lastElementChild.click()")
        last = marks[-1].partition(":")[0]
        page.wait_until(f"$('where').textContent.startsWith('{last} of ')")
        assert page.evaluate("$('keys').hidden") is True
        page.press("?")
        assert page.evaluate("$('keys').hidden") is False and page.errors == []


def test_a_request_shows_its_page_table(tmp_path: Path) -> None:
    """Also to a person without a mouse: a request has the focus."""
    trace = trace_of("m4_radix")
    frame, state = next((frame, state) for frame, state in trace.states() if state.nodes)
    number, request = next((n, r) for n, r in state.requests.items() if r.get("pages"))
    with played(tmp_path, player_html(trace), f"#step={frame.step}") as page:
        page.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        page.evaluate(f"document.querySelector('[data-request=\"{number}\"]').focus()")
        shown = page.evaluate("$('page-table').textContent")
    assert shown == f"Page table of r{number}: {' '.join(map(str, request['pages']))}"


def test_the_page_works_inside_another_one(tmp_path: Path) -> None:
    """There, a browser may forbid it to change the address."""
    inner = html.escape(player_html(trace_of("m2_continuous")))
    frame = f'<p id="where">.</p><iframe sandbox="allow-scripts" srcdoc="{inner}"></iframe>'
    script = """<script>const $ = name => document.getElementById(name); let said = "";
    addEventListener("message", event => { said = event.data; });</script>"""
    reporting = "setTimeout(() => parent.postMessage($('error').textContent + shown, '*'), 2500);"
    frame = frame.replace(html.escape("load(JSON"), html.escape(f"{reporting}load(JSON"))
    with played(tmp_path, script + frame) as page:
        page.wait_until("said")
        assert re.fullmatch(r"\d+", page.evaluate("said")) and page.errors == []


def test_an_emulated_forward_is_labelled(tmp_path: Path) -> None:
    trace = trace_of(MILESTONES[-1])
    emulated: dict[str, Any] = {**trace.meta, "emulated_forward_ms": 20}
    labelled = TraceData(emulated, trace.origin, trace.requests, frames=trace.frames)
    made = dom(tmp_path, player_html(labelled), "#step=1")
    assert text_of(made, "emulated") == "emulated forward: 20 ms"
    assert text_of(made, "error") == ""


def test_nothing_is_loaded_and_nothing_breaks_out() -> None:
    page = player_html(trace_of(MILESTONES[-1]))
    addresses = set(re.findall(r"\bhttps?://[^\"'\s]*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the SVG namespace may be there"
    assert not re.search(r"\b(src|href)=|url\((?!#)|@import|\bfetch\(", page)
    assert page.count("</script>") == template().count("</script>") == 2
    assert "\u2028" not in page and "\u2029" not in page


@pytest.mark.parametrize("tag", ["button", "input", "select"])
def test_what_can_be_used_has_a_name(tag: str) -> None:
    for element in re.findall(rf"<{tag}\b[^>]*>", template()):
        assert "aria-label=" in element, element
