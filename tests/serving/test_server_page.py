"""The live page: its calls, its events, and the page itself in a browser."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from milestones.chain import at_least
from tests.conftest import EngineFactory, build_engine, shared_model
from tests.displays.test_player import dom, text_of
from tests.helpers.browser import Tab, tab
from tests.helpers.serving import CHAT, COMPLETE, PATIENCE, Running, Serve, call, hold_steps, read

pytestmark = [pytest.mark.extra("serve"), pytest.mark.one_mode]
only_highest = pytest.mark.since("m5_overlap")

CONFIG: dict[str, Any] = {"max_num_seqs": 6, "page_size": 4, "num_pages": 600}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}


class Watcher:
    """An open page, as the server sees it."""

    def __init__(self, run: Running, query: str = "") -> None:
        self.run = run
        self.connection = http.client.HTTPConnection("127.0.0.1", run.port, timeout=PATIENCE)
        self.connection.request("GET", f"/live{query}")
        self.response = self.connection.getresponse()
        self.first = self.event()
        self.name = self.first["page"]

    def event(self) -> dict[str, Any]:
        line = self.response.readline().decode()
        assert self.response.readline() == b"\n" and line.startswith("data: "), line
        found: dict[str, Any] = json.loads(line[len("data: ") :])
        return found

    def until(self, name: str) -> list[dict[str, Any]]:
        """Return the events up to one that has this part."""
        events = [self.event()]
        while name not in events[-1]:
            events.append(self.event())
        return events

    def post(self, name: str, **body: Any) -> tuple[int, Any]:
        return self.run.post(f"/live/{name}", {"page": self.name, **body})[:2]


@contextmanager
def watching(run: Running, query: str = "") -> Iterator[Watcher]:
    watcher = Watcher(run, query)
    try:
        yield watcher
    finally:
        watcher.response.close()
        watcher.connection.close()


def wrappers(engine: Any) -> tuple[set[str], int]:
    """Return what a recording would add to the engine and to its model."""
    hooks = len(shared_model("tiny-llama").model._forward_hooks)
    return {*vars(engine), *vars(engine.core.scheduler), *vars(engine.output_processor)}, hooks


def slow_steps(engine: Any, seconds: float) -> None:
    """Let each step take longer, so that requests are still open when a test ends them."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow


def test_a_page_gets_steps_and_the_end_of_its_request(serve: Serve) -> None:
    run = serve()
    with watching(run) as page:
        assert page.first["begin"]["version"] == 3 and len(page.first["begin"]["frames"]) == 1
        status, answer = page.post("ask", temperature=0, **TALK)
        assert status == 200
        events = page.until("answers")
        (end,) = events[-1]["answers"]
        frames = [f for event in events for f in event.get("steps", {"frames": []})["frames"]]
        frames = [*page.first["begin"]["frames"], *frames]
        assert [frame["step"] for frame in frames] == list(range(len(frames)))
        told = "".join(c.get("text", "") for f in frames for c in f.get("requests", {}).values())
        assert end["id"] == answer["id"] and end["text"].startswith(told)
        assert end["reason"] in ("stop", "length") and end["error"] is None
    whole = run.post(CHAT, {**TALK, "temperature": 0})[1]
    assert whole["choices"][0]["message"]["content"] == end["text"]


@only_highest
def test_without_a_page_nothing_is_recorded(make_engine: EngineFactory, serve: Serve) -> None:
    """The recording begins with the first page, and ends with the last one."""
    engine = make_engine()
    run = serve(engine)
    before = run.in_engine(wrappers)
    run.post(COMPLETE, call())
    assert run.in_engine(wrappers) == before
    with watching(run):
        assert run.in_engine(wrappers) != before
        with watching(run):
            pass
        run.wait_until(lambda: len(run.api.live.pages) == 1)
        assert run.in_engine(wrappers) != before
    run.wait_until(lambda: not run.api.live.pages)
    assert (
        run.in_engine(wrappers) == before and not run.api.live.engines.first.recorder.is_recording
    )


@only_highest
def test_a_page_that_is_closed_aborts_its_requests(
    make_engine: EngineFactory, serve: Serve
) -> None:
    """Chats and the crowd end. The requests of other clients go on."""
    engine = make_engine()
    slow_steps(engine, 0.01)
    run = serve(engine)
    other = run.open(COMPLETE, call(stream=True))
    with watching(run) as page:
        assert page.post("ask", **{**TALK, "max_tokens": 400})[0] == 200
        assert page.post("crowd", rate=100, system="Be kind.", max_tokens=400)[0] == 200
        run.wait_until(lambda: run.api.open.count > 4)
    run.wait_until(lambda: not run.api.live.pages)
    run.wait_until(lambda: run.api.open.count <= 1)
    assert b"error" not in read(other, b"[DONE]")


@only_highest
def test_stop_ends_one_request(make_engine: EngineFactory, serve: Serve) -> None:
    engine = make_engine()
    slow_steps(engine, 0.1)
    run = serve(engine)
    with watching(run) as page:
        ids = [page.post("ask", **TALK)[1]["id"] for _ in range(2)]
        assert page.post("stop", id=ids[0])[1] == {"stopped": True}
        (end,) = page.until("answers")[-1]["answers"]
        assert (end["id"], end["reason"]) == (ids[0], "abort")
        assert page.post("stop", id=ids[0])[1] == {"stopped": False}
        (end,) = page.until("answers")[-1]["answers"]
        assert end["id"] == ids[1] and end["reason"] != "abort"


@only_highest
def test_a_slow_page_begins_again(serve: Serve) -> None:
    """A page that missed a step gets the state of now. No step waits for it."""
    run = serve()
    with watching(run) as page:
        run.post(COMPLETE, call(max_tokens=40, ignore_eos=True))
        newest = run.in_engine(lambda engine: run.api.live.engines.first.recorder._trace._step)
        run.api.live.pages[page.name]._step -= 1000  # steps that are no longer kept
        frames = page.until("begin")[-1]["begin"]["frames"]
        assert [frame["step"] for frame in frames] == [newest] and newest > 30
        assert page.post("again")[0] == 200
        assert page.until("begin")[-1]["begin"]["frames"][0]["step"] == newest


@only_highest
def test_wrong_calls_are_refused(serve: Serve) -> None:
    run = serve(max_open_requests=1)
    with watching(run) as page:
        for name, body, field in (
            ("ask", {**TALK, "temperature": -1}, "temperature"),
            ("ask", {**TALK, "max_tokens": "many"}, "max_tokens"),
            ("ask", {**TALK, "messages": []}, "messages"),
            ("ask", {**TALK, "messages": [{"role": "user", "content": "x" * 999}]}, "prompt"),
            ("ask", {**TALK, "seed": 1}, "seed"),
            ("crowd", {"rate": 1e9, "system": ""}, "rate"),
            ("crowd", {"rate": -1, "system": ""}, "rate"),
            ("crowd", {"rate": 1, "system": "", "top_p": 0}, "top_p"),
        ):
            status, answer = page.post(name, **body)
            assert status == 400 and answer["error"]["param"] == field, (name, answer)
        for name, fields in (("ask", TALK), ("stop", {"id": "chat-1"}), ("again", {})):
            assert run.post(f"/live/{name}", {"page": "page-99", **fields})[0] == 404
        with run.api.open.place_for(1):
            assert page.post("ask", **TALK)[0] == 429
        assert run.api.open.count == 0


@only_highest
def test_a_crowd_that_is_too_large_is_refused(make_engine: EngineFactory, serve: Serve) -> None:
    """Its users count against the limit of open requests, and the page gets the numbers."""
    engine = make_engine()
    release = hold_steps(engine)
    run = serve(engine, max_open_requests=2)
    with watching(run) as page:
        page.post("crowd", rate=100, system="Be kind.", max_tokens=4)
        told = page.until("crowd")[-1]["crowd"]
        while told["refused"] < 3:
            told = page.until("crowd")[-1]["crowd"]
        assert told["users"] >= told["refused"] + 2
        page.post("crowd", rate=0, system="Be kind.")
        release()
        run.wait_until(lambda: run.api.open.count == 0)


@only_highest
def test_the_end_of_the_engine_ends_the_events(make_engine: EngineFactory, serve: Serve) -> None:
    engine = make_engine()

    def failing() -> Any:
        raise AssertionError("I3: planted")

    run = serve(engine)
    before = wrappers(engine)
    with watching(run) as page:
        run.in_engine(lambda engine: setattr(engine, "step", failing))
        page.post("ask", **TALK)
        assert "planted" in page.until("error")[-1]["error"]["message"]
        assert page.response.read() == b""
    run.wait_until(lambda: not run.api.live.pages)
    run.server.loop.call_soon_threadsafe(run.server._start_draining)
    run.wait_until(lambda: not run.api.live.engines.first.recorder.is_recording)
    assert wrappers(engine)[1] == before[1]


@only_highest
def test_a_server_stops_while_a_page_is_open(serve: Serve) -> None:
    run = serve()
    with watching(run) as page:
        page.post("crowd", rate=20, system="Be kind.", max_tokens=4)
        page.until("steps")
        run.server.loop.call_soon_threadsafe(run.server._start_draining)
        run.wait_until(lambda: not run.api.engine.is_alive)
        assert not run.api.live.engines.first.recorder.is_recording


@only_highest
def test_the_page_needs_no_key_and_its_calls_do(serve: Serve) -> None:
    run = serve(api_key="secret")
    status, page = run.get("/")
    assert status == 200 and "<title>LLM Ladder" in page
    assert run.get("/live")[0] == 401
    assert run.post("/live/ask", {"page": "page-1", **TALK})[0] == 401
    assert run.call("GET", "/live", None, {"Authorization": "Bearer no"})[0] == 401


@only_highest
def test_a_server_without_a_page(serve: Serve) -> None:
    run = serve(live_page=False)
    assert run.get("/")[0] == run.get("/live")[0] == 404


def test_the_page_loads_nothing() -> None:
    from milestones.serving.server.live.routes import live_html, pair_html

    page, pair = live_html(), pair_html(["m3_paged", "m4_radix"])
    assert set(re.findall(r"\bhttps?://[^\"'\s\\]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "http" not in pair.replace("http-equiv", "") and "fetch" not in pair
    links = re.findall(r"\b(?:src|href)=\"[^\"]*", page + pair)
    frames = [f'src="/?engine={name}' for name in ("m3_paged", "m4_radix")]
    assert links == ['href="data:,', 'href="data:,', *frames] and "@import" not in page + pair
    calls = {"fetch(`/live${location.search}`,", "fetch(`/live/${name}`,"}
    assert set(re.findall(r"fetch\(.\S*", page)) == calls
    for element in re.findall(r"<(?:button|input|select|textarea)\b[^>]*>", page + pair):
        assert "aria-label=" in element, element


# ---- In the browser ----------------------------------------------------------------------------

READY = "page !== null && shown !== null"
ANSWERED = "chats.every(chat => !chat.waiting && chat.messages.length === {})"
SIZES = ((1425, 900), (375, 844))  # of windows with a scroll bar, which the browser hides


def set_slider(page: Tab, name: str, value: float) -> None:
    page.evaluate(
        f"$('{name}').value = {value};"
        + "".join(
            f"$('{name}').dispatchEvent(new Event('{kind}'));" for kind in ("input", "change")
        )
    )


def assert_fits(page: Tab) -> None:
    """Require that nothing is wider than the window, and that no error is shown."""
    root = "document.documentElement"
    wide = page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
    assert wide <= 0, f"the page is {wide} pixels wider than the window"
    assert page.evaluate("$('error').textContent") == ""
    assert page.errors == []


@contextmanager
def opened(run: Running, folder: Path) -> Iterator[Tab]:
    with tab(folder, f"http://127.0.0.1:{run.port}/") as page:
        page.resize(*SIZES[0])
        page.wait_until(f"typeof page !== 'undefined' && {READY}")
        yield page
        assert page.errors == []


# What is cut off, at any step: the facts of a chat, the values of a curve, a column of a request.
CUT = """(() => {
  const cut = new Set(), now = shown;
  for (let step = firstStep(); step <= lastStep(); step++) {
    jump(step);
    for (const e of document.querySelectorAll(".facts, #curves p, .row > :not(.text)")) {
      if (e.scrollWidth > e.clientWidth) cut.add(e.textContent);
    }
  }
  show(now);
  play(true);
  return [...cut];
})()"""


def twelve(page: Tab) -> None:
    """Ask a question in each of twelve conversations, and a second one in each."""
    page.evaluate("while (chats.length < 12) $('new-chat').click()")
    set_slider(page, "max_tokens", 8)
    for messages in (2, 4):
        page.evaluate("$('ask-all').click()")
        page.wait_until(ANSWERED.format(messages))


@pytest.mark.thorough("seconds of a browser on each engine", fast_on=("m5_overlap",))
def test_twelve_conversations(
    milestone: str, make_engine: EngineFactory, serve: Serve, tmp_path: Path
) -> None:
    """Twelve conversations, wide and narrow; steps back; and the recording as a player file."""
    run = serve(make_engine(**CONFIG))
    with opened(run, tmp_path) as page:
        twelve(page)
        assert page.evaluate("chats.flatMap(c => c.messages).filter(m => m.failed)") == []
        for size in SIZES:
            page.resize(*size)
            page.evaluate("new Promise(done => setTimeout(done, 150))")
            assert_fits(page)
            assert page.evaluate(CUT) == []
        assert page.evaluate("$('engine').textContent") == milestone
        names = "Object.values(requests).map(r => r.request_id.replace('-', ' '))"
        assert page.evaluate(f"{names}.filter(n => chats.some(c => c.name === n))") == []
        left = page.evaluate("[...$('ended').querySelectorAll('.bar')].map(bar => bar.title)")
        assert left and all(title.endswith(", 1 not computed") for title in left)
        legend = page.evaluate("[$('requests').innerText, $('curves').innerText].join(' ')")
        assert ("cached" in legend) == at_least(milestone, "m4_radix")
        panels = page.evaluate("[!$('pages').hidden, !$('tree').hidden]")
        assert panels == [at_least(milestone, "m2_continuous"), at_least(milestone, "m4_radix")]
        cached = page.evaluate("newest.stats.cached_prompt_tokens")
        assert (cached > 0) == at_least(milestone, "m4_radix")
        assert ("hit rate" in page.evaluate("$('rates').textContent")) == (cached > 0)
        same = "chats.every(c => c.messages.every(m => !m.id || c.textOf(m) === m.content))"
        page.wait_until(f"shown === lastStep() && {same}")
        page.evaluate("document.activeElement.blur()")
        page.press(" ")
        steps = page.evaluate("lastStep()")
        page.press("ArrowLeft")
        page.press("ArrowLeft")
        assert page.evaluate("[playing, shown]") == [False, steps - 2]
        page.evaluate("$('save').click()")
        run.wait_until(lambda: any(tmp_path.glob("*.html")))
        (saved,) = tmp_path.glob("*.html")
        assert_fits(page)
    made = dom(tmp_path, saved.read_text(encoding="utf-8"), f"#step={steps}")
    assert text_of(made, "error") == "" and text_of(made, "engine") == milestone
    assert text_of(made, "where").startswith(f"step {steps} of {steps} ")
    assert text_of(made, "ended-title").endswith(": 24")


@only_highest
def test_pause_freezes_the_picture(serve: Serve, tmp_path: Path) -> None:
    """Steps that come while it is frozen are shown afterwards. A question ends the pause."""
    run = serve()
    with opened(run, tmp_path) as page:
        page.evaluate("play(false)")
        frozen = page.evaluate("$('running').parentElement.innerHTML + $('where').textContent")
        run.post(COMPLETE, call(ignore_eos=True))
        page.wait_until("numHeld > 10")
        now = page.evaluate("$('running').parentElement.innerHTML + $('where').textContent")
        assert now == frozen
        page.evaluate("play(true)")
        page.wait_until("shown > 10 && numHeld === 0")
        page.evaluate("play(false); chats[0].ask('Hi')")
        page.wait_until("playing && !chats[0].waiting && chats[0].messages.length === 2")
        assert_fits(page)


@only_highest
def test_the_memory_of_the_page_is_bounded(serve: Serve, tmp_path: Path) -> None:
    """Old steps are forgotten, in the recording and in a pause. The rest can still be saved."""
    run = serve()
    with opened(run, tmp_path) as page:
        page.evaluate("forget = (old => () => old(20))(forget)")
        run.post(COMPLETE, call(max_tokens=60, ignore_eos=True))
        page.wait_until("lastStep() >= 60 && frames.length <= 20 && shown === lastStep()")
        run.post(COMPLETE, call(max_tokens=60, ignore_eos=True))
        page.wait_until("lastStep() >= 120 && frames.length <= 20 && shown === lastStep()")
        numbers = "[requests, newest.requests, base.requests].map(r => Object.keys(r).join())"
        assert page.evaluate(numbers) == ["1"] * 3
        page.evaluate("for (let s = lastStep(); s >= firstStep(); s--) jump(s)")
        assert page.evaluate("shown === firstStep()")
        same = "begin(JSON.parse(JSON.stringify(saved()))); [frames.length, firstStep()].join()"
        kept = page.evaluate("[frames.length, firstStep()].join()")
        before = page.evaluate("goTo(lastStep()); JSON.stringify(state)")
        assert page.evaluate(same) == kept
        assert page.evaluate("goTo(lastStep()); JSON.stringify(state)") == before
        assert_fits(page)


@only_highest
def test_a_long_pause_begins_again(serve: Serve, tmp_path: Path) -> None:
    """Steps that still come between the end of the pause and the new beginning have no place."""
    run = serve()
    with opened(run, tmp_path) as page:
        page.evaluate("play(false); numHeld = MOST_STEPS")
        run.post(COMPLETE, call(ignore_eos=True))
        page.wait_until("isStale && held.length === 0")
        late = "new Promise(done => (release = done))"
        page.evaluate(f"fetch = (old => (...all) => {late}.then(() => old(...all)))(fetch)")
        page.evaluate("release = null; takes = 0; take = (old => e => (takes++, old(e)))(take)")
        page.evaluate("play(true)")
        page.wait_until("release !== null")
        run.post(COMPLETE, call(ignore_eos=True))
        page.wait_until("takes > 1")
        page.evaluate("release()")
        page.wait_until("!isStale && shown === lastStep()")
        first, count = page.evaluate("[firstStep(), frames.length]")
        assert first > 10 and count < 5, "the steps of the pause are left out"


@only_highest
def test_a_page_asks_for_the_key(serve: Serve, tmp_path: Path) -> None:
    run = serve(api_key="secret")
    with tab(tmp_path, f"http://127.0.0.1:{run.port}/") as page:
        page.wait_until("typeof page !== 'undefined' && !$('key-form').hidden")
        page.evaluate("$('key').value = 'secret'; $('key-form').requestSubmit()")
        page.wait_until(f"{READY} && $('key-form').hidden")
        set_slider(page, "temperature", 0)  # a drawn answer may end with its first token
        page.evaluate("chats[0].ask('Hi')")
        page.wait_until("!chats[0].waiting && chats[0].messages[1].content !== ''")


@only_highest
def test_a_long_queue_is_cut_and_emptied(
    make_engine: EngineFactory, serve: Serve, tmp_path: Path
) -> None:
    """The page names 24 of the waiting requests, and a button aborts all that are its own."""
    engine = make_engine(max_num_seqs=1)
    slow_steps(engine, 0.2)
    run = serve(engine)
    with opened(run, tmp_path) as page:
        page.evaluate("for (let n = 0; n < 30; n++) addChat()")
        page.evaluate("chats.forEach(chat => chat.ask('Hi'))")
        page.wait_until("state.waiting.length === 32 && chats.every(chat => chat.waiting?.id)")
        page.wait_until("$('waiting').textContent.endsWith('and 8 more')")
        assert page.evaluate("$('waiting').querySelectorAll('.chip').length") == 24
        page.evaluate("$('empty').click()")
        page.wait_until("state.waiting.length === 0 && chats.filter(c => c.waiting).length === 1")
        assert page.evaluate("$('connection').textContent") == "live" and page.errors == []


@only_highest
def test_a_page_connects_again(make_engine: EngineFactory, serve: Serve, tmp_path: Path) -> None:
    """When its events end, a page ends its chats and begins again."""
    engine = make_engine()
    slow_steps(engine, 0.1)
    run = serve(engine)
    with opened(run, tmp_path) as page:
        page.evaluate("chats[0].ask('Hi')")
        page.wait_until("chats[0].waiting?.id")
        first = page.evaluate("page")
        run.server.loop.call_soon_threadsafe(run.api.live.close_pages)
        page.wait_until(f"page !== '{first}' && {READY} && $('connection').textContent === 'live'")
        assert page.evaluate("chats[0].waiting") is None
        set_slider(page, "max_tokens", 8)
        page.evaluate("chats[0].ask('Again')")
        page.wait_until("!chats[0].waiting && chats[0].messages.length === 4")
        assert page.evaluate("chats[0].messages[3].failed") is None


@only_highest
def test_small_memory_in_the_browser(
    make_engine: EngineFactory, serve: Serve, tmp_path: Path
) -> None:
    """A button changes to an engine with few pages, and a crowd soon makes it evict."""
    run = serve(make_engine(**CONFIG))
    with opened(run, tmp_path) as page:
        page.evaluate("$('memory').click()")
        page.wait_until("$('memory').ariaPressed === 'true' && meta.num_pages < 600")
        set_slider(page, "crowd", 9)
        page.wait_until("events.flat().some(e => ['evict', 'retract'].includes(e.kind))")
        for size in SIZES:
            page.resize(*size)
            page.evaluate("new Promise(done => setTimeout(done, 150))")
            assert_fits(page)
        set_slider(page, "crowd", 0)
        page.evaluate("$('memory').click()")
        page.wait_until("$('memory').ariaPressed === 'false' && meta.num_pages === 600")
        page.wait_until("!$('memory').disabled")
        assert page.evaluate("$('connection').textContent") == "live"
    run.wait_until(lambda: run.api.live.engines._small is None)


IN_FRAMES = "Array.from(frames, f => ({})(name => f.document.getElementById(name)))"


@only_highest
def test_two_engines_in_the_browser(
    make_engine: EngineFactory, serve: Serve, tmp_path: Path
) -> None:
    """One bar for both: the crowd, a question, the pause. Lanes and pages of both can be seen."""
    engine = make_engine(**CONFIG)
    run = serve(engine, beside=build_engine("m3_paged", **CONFIG))

    def of_frames(function: str) -> Any:
        return page.evaluate(IN_FRAMES.replace("{}", function))

    with tab(tmp_path, f"http://127.0.0.1:{run.port}/") as page:
        page.resize(1425, 900)
        page.wait_until("typeof pages === 'function' || typeof SAMPLING !== 'undefined'")
        page.wait_until("pages().length === 2")
        names = [*run.api.live.engines.by_name]
        assert of_frames("$ => $('engine').textContent") == names and names[1] == "m3_paged"
        page.evaluate("$('question').value = 'Hello both'; $('bar').requestSubmit()")
        set_slider(page, "crowd", 9)
        said = IN_FRAMES.replace("{}", "$ => $('requests').textContent")
        page.wait_until(f"{said}.every(text => text.includes('Hello both'))")
        page.wait_until(f"{said}.every(text => text.includes('user-'))")
        seen = "$ => ['lanes', 'map'].every(n => $(n).getBoundingClientRect().top < 800)"
        assert of_frames(seen) == [True, True]
        page.evaluate("$('play').click()")
        paused = IN_FRAMES.replace("{}", "$ => $('connection').className")
        page.wait_until(f"{paused}.join() === 'paused,paused'")
        page.evaluate("$('play').click()")
        page.wait_until(f"{paused}.join() === ','")
        set_slider(page, "crowd", 0)
        page.evaluate("$('empty').click()")
        page.resize(*SIZES[1])
        tops = "[...document.querySelectorAll('iframe')].map(f => f.offsetTop)"
        page.wait_until(f"(([a, b]) => b > a + 500)({tops})")
        root = "document.documentElement"
        assert page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
        assert of_frames("$ => $('error').textContent") == ["", ""]
        assert page.evaluate("$('note').textContent") == "" and page.errors == []


@only_highest
def test_the_frames_of_two_engines_ask_for_one_key(
    make_engine: EngineFactory, serve: Serve, tmp_path: Path
) -> None:
    run = serve(make_engine(), beside=build_engine("m4_radix"), api_key="secret")
    with tab(tmp_path, f"http://127.0.0.1:{run.port}/") as page:
        page.wait_until("typeof SAMPLING !== 'undefined' && frames.length === 2")
        forms = IN_FRAMES.replace("{}", "$ => $('key-form')?.hidden")
        page.wait_until(f"{forms}.join() === 'false,false'")
        key = "$ => { $('key').value = 'secret'; $('key-form').requestSubmit(); }"
        page.evaluate(f"[frames[0]].map(f => ({key})(name => f.document.getElementById(name)))")
        page.wait_until(f"pages().length === 2 && {forms}.join() === 'true,true'")
