"""The demos, written to a file: the facts that they show, and no control codes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from common import EngineConfig, EngineStats, PoolingParams, TokensPrompt, load_model
from common.clock import StepCosts
from common.displays import comparison
from common.displays.dashboard import Dashboard
from common.displays.measured_costs import measure_costs
from common.displays.workload import Workload, WorkloadResult, run
from common.tracing.data import TraceData
from common.virtual_time import use_virtual_time
from milestones.chain import at_least, electives, load, package
from tests.conftest import MILESTONES, ROOT, EngineFactory, build_engine
from tests.helpers.oracle import greedy

DemoHere = Callable[..., tuple[str | int | None, str, str]]
Live = Callable[..., str]
not_of_electives = pytest.mark.before(*electives())
LESSON_PANEL = {  # how the panel that stays on a low screen begins
    "m2_continuous": "the slot cache",
    "m3_paged": "page tables",
    "m4_radix": "tree",
    "m5_overlap": "lanes",
}


def arguments_of(folder: Path) -> list[str]:
    """Return the arguments of the run that most tests look at. It writes a trace and a player."""
    small = ["--model", "tiny-llama", "--requests", "4", "--max-tokens", "5", "--check"]
    return [*small, "--trace", f"{folder}/trace.json", "--player", f"{folder}/player.html"]


def run_milestone_here(milestone: str, workload: Workload) -> WorkloadResult:
    """Do what `run_milestone` does, without a process that imports torch."""
    with importlib.import_module(milestone).LLMEngine(EngineConfig(**workload.config)) as engine:
        if workload.costs is not None:
            use_virtual_time(engine, StepCosts(**workload.costs))
        return run(engine, workload)


@functools.cache
def usual_run(milestone: str) -> tuple[str, Path]:
    """Return what the demo shows, and the folder of its trace and its player."""
    folder = Path(tempfile.mkdtemp())
    return run_here(milestone, folder), folder


def run_here(milestone: str, folder: Path) -> str:
    """Run the demo in this process. Return what it shows."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(comparison, "run_milestone", run_milestone_here)
        patch.setattr(sys, "argv", ["demo", *arguments_of(folder)])
        patch.setenv("COLUMNS", "80")
        load(milestone, "demo").main()
    return shown.getvalue()


def assert_facts(milestone: str, *facts: str) -> None:
    shown, _ = usual_run(milestone)
    for fact in facts:
        assert fact in shown, shown


def assert_whole(milestone: str, shown: str, folder: Path) -> None:
    """Check what a demo shows in a file, and the two files that it writes."""
    assert "\x1b" not in shown and "\r" not in shown
    assert milestone in shown and "tokens/s" in shown
    for path in (folder / "trace.json", folder / "player.html"):
        assert str(path) in shown and milestone in path.read_text(encoding="utf-8")


def test_the_demo_runs_into_a_file(milestone: str) -> None:
    assert_whole(milestone, *usual_run(milestone))


@pytest.mark.since("m5_overlap")
@not_of_electives
def test_the_command_of_the_demo(milestone: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"{package(milestone)}.demo", *arguments_of(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_whole(milestone, done.stdout, tmp_path)


def test_sentences_wrap_between_words(milestone: str) -> None:
    """A terminal with 80 columns does not have to break them. Events and paths stay one line."""
    other = re.compile(r" *\d+\.\d\ds  |(trace|player): |[╭│╰┏┃┡└]")
    lines = usual_run(milestone)[0].splitlines()
    assert [line for line in lines if len(line) > 80 and not other.match(line)] == []


@pytest.fixture
def demo_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DemoHere:
    """Return a function that runs a demo here. It returns the exit code, stdout and stderr."""

    def run(milestone: str, *arguments: str) -> tuple[str | int | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])
        code: str | int | None = 0
        try:
            load(milestone, "demo").main()
        except SystemExit as exit:
            code = exit.code
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--max-tokens", "many"]])
def test_bad_arguments(milestone: str, arguments: list[str], demo_here: DemoHere) -> None:
    code, _, said = demo_here(milestone, *arguments)
    assert code == 2 and arguments[0] in said


def test_a_model_that_is_not_there(milestone: str, demo_here: DemoHere) -> None:
    """The demo prints one line, and no traceback."""
    code, _, _ = demo_here(milestone, "--model", "/nowhere/model.gguf")
    assert code == "model '/nowhere/model.gguf' does not exist"


@pytest.mark.before("m3_paged")
def test_only_pages_can_be_retracted(milestone: str, demo_here: DemoHere) -> None:
    code, _, _ = demo_here(milestone, "--model", "tiny-llama", "--retract-every", "5")
    assert "--retract-every needs" in str(code)


@pytest.mark.before("m2_continuous")
def test_what_the_first_milestone_shows(milestone: str) -> None:
    assert_facts(
        milestone, "with the KV cache", "full recompute", "The text is the same.", "256 tokens"
    )


@pytest.mark.since("m2_continuous")
def test_requests_that_arrive_are_served(milestone: str) -> None:
    assert_facts(milestone, "r3 joins", "r3 ends", "ratio", "throughput")


@pytest.mark.since("m2_continuous")
@pytest.mark.before("m5_overlap")
def test_the_demo_compares_with_the_milestone_below(milestone: str) -> None:
    assert_facts(milestone, "KV memory", "m" + str(int(milestone[1]) - 1))


@pytest.mark.since("m4_radix")
@pytest.mark.before("m5_overlap")
def test_what_the_fourth_milestone_shows(milestone: str) -> None:
    assert_facts(milestone, "hit rate", "TTFT", "dfs-weight", "Say that again in one sentence.")


@pytest.mark.since("m5_overlap")
@not_of_electives
def test_what_the_fifth_milestone_shows(milestone: str) -> None:
    """The machine's seconds first; then both loops in virtual time, on one time axis."""
    shown, _ = usual_run(milestone)
    title = "all requests at once, in virtual time"
    assert_facts(milestone, title, "Say that again in one sentence.", "lanes of both loops")
    words = " ".join(shown.split())
    assert "The tokens are the same." in words
    assert words.index("expect a draw") < words.index("This machine took") < words.index(title)
    assert re.search(r"serial: \d+ steps, .* ms: the forward lane is busy \d+% of the time", words)
    assert "the forward lane is busy 100% of the time" in words.partition("overlapped: ")[2]


@pytest.mark.since("m5_overlap")
@not_of_electives
def test_all_milestones(
    milestone: str, demo_here: DemoHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of all milestones is in the same virtual time."""
    asked = []

    def run_milestone(milestone: str, workload: Workload) -> WorkloadResult:
        asked.append((milestone, workload.costs))
        return WorkloadResult([[1]], 1.0, [0.5], stats=asdict(EngineStats(num_steps=1)))

    monkeypatch.setattr(comparison, "run_milestone", run_milestone)
    tiny = ("--model", "tiny-llama", "--requests", "2", "--max-tokens", "3", "--plain")
    code, shown, _ = demo_here(milestone, *tiny, "--ladder")
    assert code == 0
    assert asked == [(name, asdict(StepCosts())) for name in MILESTONES]
    for name in ("all milestones", "m1", "m2", "m3", "m4", "m5"):
        assert name in shown.partition("which serves")[2]


@pytest.mark.since("m5_overlap")
@not_of_electives
def test_on_a_gpu_its_gaps_are_shown(
    milestone: str, demo_here: DemoHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load(milestone, "demo"), "runs_on_gpu", lambda engine: True)
    tiny = ("--model", "tiny-llama", "--requests", "1", "--max-tokens", "2", "--plain")
    code, shown, _ = demo_here(milestone, *tiny)
    table = shown.partition("all requests at once, on this GPU")[2].partition("On a device")[0]
    assert code == 0 and "gap between forwards, mean" in table and "expect a draw" not in shown


@not_of_electives
def test_two_runs_of_a_demo_say_the_same(milestone: str) -> None:
    """Only the seconds of the machine differ: all else is counted, or in virtual time."""
    shown, folder = usual_run(milestone)
    first, second = machine_left_out(shown), machine_left_out(run_here(milestone, folder))
    assert first == second and "Virtual time, the same on every machine: " in first


@not_of_electives
def test_a_demo_names_the_next_one(milestone: str) -> None:
    position = MILESTONES.index(milestone)
    commands = [f"Next: python -m {name}.demo" for name in MILESTONES[position + 1 :][:1]]
    assert [line for line in usual_run(milestone)[0].splitlines() if "Next:" in line] == commands


def machine_left_out(shown: str) -> str:
    """Return what a demo shows without the seconds of the machine, of which each has its place."""
    words = re.sub(r" \S+ \(process \d+\) uses .*? does not change\.", "", " ".join(shown.split()))
    took = r"([Tt]his machine took|loop, and) [\d.,]+ m?s(, [\d.]+ m?s)*"
    words = re.sub(took, r"\1", words)
    return re.sub(r"(│ [\d.]+ m?s) │ [\d.]+ m?s │", r"\1", words)


@pytest.mark.before("disaggregated")  # prompts are forwards of the other side
def test_the_clock_can_be_that_of_the_machine(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that sleeps is found in the costs. How fast the machine is does not matter.

    A sleep of 2.5 ms was measured as 2.4 once, so four fifths of each sleep are enough.
    """
    engine: Any = make_engine(max_num_seqs=4)
    model = engine.core.runner.model
    forward = model.forward

    @functools.wraps(forward)
    def slow(*args: Any, **inputs: Any) -> Any:
        input_ids = args[0] if args else inputs["input_ids"]
        time.sleep((2 + 0.5 * input_ids.numel()) / 1000)
        return forward(*args, **inputs)

    monkeypatch.setattr(model, "forward", slow)
    costs = measure_costs(engine)
    assert costs.forward_seconds(1) > 0.002 and costs.forward_seconds(64) > 0.0272
    assert costs.host > 0.0 and costs.host_row >= 0.0


@pytest.mark.since("m2_continuous")
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 40), (200, 50)])
def test_the_screen_fits_a_terminal(milestone: str, width: int, height: int) -> None:
    """Requests, and the panel of the lesson, are on the screen in every step. A low one gives
    advice."""
    demo = load(milestone, "demo.panels")
    panel_of_lesson = LESSON_PANEL[milestone if milestone in LESSON_PANEL else MILESTONES[-1]]
    config: dict[str, Any] = {"max_num_seqs": 6, "page_size": 8, "num_pages": 256}
    engine: Any = build_engine(milestone, **config)
    with Console(width=width, height=height, file=io.StringIO()) as console:
        panels = demo.Panels(engine, console)
        if at_least(milestone, MILESTONES[-1]):
            lanes = load(milestone, "demo.lanes")
            panels = lanes.LivePanels(engine, TraceData({}, 0.0), console)
        dashboard = Dashboard(engine, "requests", console, panels, True)
        for number in range(12):
            prompt = [*range(1, 90), 100 + number]
            engine.add_request(prompt, greedy(6, ignore_eos=True), f"r{number}")
            dashboard.add(f"r{number}", f"question {number}")
        states = set()
        while engine.has_unfinished_requests():
            dashboard.step()
            lines = written(dashboard.render(), console)
            assert len(lines) <= height, f"{len(lines)} lines"
            assert any(line.startswith(f"╭─ {panel_of_lesson}") for line in lines)
            assert height < 40 or not any("shows more" in line for line in lines)
            states |= {entry.state for entry in dashboard.entries.values() if entry.row is not None}
    assert states == {"running"}, "a request with memory runs"
    engine.close()


def written(shown: Any, console: Console) -> list[str]:
    """Return the lines of what is shown, without styles."""
    lines = console.render_lines(shown, console.options)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.parametrize("num_lines", [3, 4, 5, 30])
def test_only_the_answers_stay_on_the_screen(milestone: str, num_lines: int) -> None:
    """The panels are empty at the end. No part of an earlier screen stays, even of a high one."""
    engine: Any = build_engine(milestone)
    out = io.StringIO()
    with Console(width=80, height=12, file=out, force_terminal=True) as console:
        lines = [Text(f"line {number}.") for number in range(num_lines)]
        with Dashboard(engine, "requests", console, lambda: lines, False) as dashboard:
            for number in range(8):
                engine.add_request([1, 2, 3], greedy(2, ignore_eos=True), f"r{number}")
                dashboard.add(f"r{number}", "question")
                dashboard.step()
            while engine.has_unfinished_requests():
                dashboard.step()
        console.print("after it")
    shown = screen(out.getvalue(), height=12)
    assert "─ requests ─" in shown[0] and shown[-1] == "after it", "\n".join(shown)
    assert sum("─ requests ─" in line for line in shown) == 1, "\n".join(shown)
    assert shown[-2].startswith("╰─") and not any("line " in line for line in shown)
    assert sum(" done " in line for line in shown) == 8
    engine.close()


@pytest.mark.since("embedding")
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_vector_is_shown_from_its_beginning(milestone: str, width: int) -> None:
    engine: Any = build_engine(milestone)
    console = Console(width=width, file=io.StringIO())
    dashboard = Dashboard(engine, "requests", console, plain=True)
    engine.add_request([1, 2, 3], PoolingParams("MEAN"), "v0")
    dashboard.add("v0", "question")
    outputs: list[Any] = []
    while not outputs:
        outputs = [*dashboard.step()]
    first, second, *_ = outputs[0].outputs.data
    assert f" [{first:.3f}, {second:.3f}, ...]" in written(dashboard.render(), console)[3]
    engine.close()


def screen(written: str, height: int) -> list[str]:
    """Return what a terminal of that many lines shows at the end, with the lines above it."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row = max(row - 1, len(lines) - height, 0)  # what has left the screen stays
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\r\x1b":
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.since("m4_radix")
@pytest.mark.parametrize("prompt_tokens", [40, 450])
def test_the_bar_of_a_request_shows_all_its_tokens(milestone: str, prompt_tokens: int) -> None:
    """The generated tokens are at the end of the bar. A long prompt does not push them out."""
    demo = load(milestone, "demo.panels")
    engine: Any = build_engine(milestone, max_num_seqs=6, page_size=8, num_pages=256)
    out = io.StringIO()
    with Console(width=80, height=24, file=out) as console:
        panels = demo.Panels(engine, console)
        prompt = [1 + number % 200 for number in range(prompt_tokens)]
        engine.add_request(prompt, greedy(24, ignore_eos=True), "r0")
        while engine.has_unfinished_requests():
            engine.step()
            console.print(*panels())
    bars = [line for line in out.getvalue().splitlines() if "A r0" in line]
    assert "+++" in bars[-1] and not any("…" in bar for bar in bars)
    engine.close()


@pytest.mark.before("m2_continuous")
def test_a_race_gives_both_sides_the_same_time(milestone: str) -> None:
    race = importlib.import_module(f"{milestone}.demo.race")
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"))
    engine_class = importlib.import_module(milestone).LLMEngine
    engines = [engine_class(EngineConfig(model="tiny-llama"), loaded, use_cache=c) for c in (1, 0)]
    runners = [race.Runner(name, engine) for name, engine in zip("ab", engines, strict=True)]
    out = io.StringIO()
    console = Console(width=100, file=out)
    prompt = TokensPrompt(prompt_token_ids=[1, 2, 3, 4, 5])
    race.race(runners, prompt, greedy(6, ignore_eos=True), console, check=True)
    assert [runner.computed for runner in runners] == [10, 45]
    assert runners[0].final.outputs[0].token_ids == runners[1].final.outputs[0].token_ids
    assert "─ a ─" in out.getvalue() and "─ 10 tokens computed, " in out.getvalue()
    assert "─ b ─" in out.getvalue() and "─ 45 tokens computed, " in out.getvalue()


@pytest.mark.before("m2_continuous")
def test_a_race_fits_a_narrow_terminal(milestone: str) -> None:
    """At 80 columns, both costs and the whole text are visible, also a text without spaces."""
    race = load(milestone, "demo.race")
    engine: Any = build_engine(milestone)
    runners = [race.Runner(name, engine) for name in ("with the KV cache", "full recompute")]
    text = "".join(f"word{i}" for i in range(20))
    for runner in runners:
        engine.add_request([1, 2, 3], greedy(4), "r0")
        while engine.has_unfinished_requests():
            runner.step(False)
        assert runner.output is not None
        runner.output.outputs[0].text, runner.seconds = text, 123.4
    out = io.StringIO()
    Console(width=80, file=out).print(race.side_by_side(runners))
    shown = out.getvalue().splitlines()
    assert all(runner.name in shown[0] for runner in runners)
    assert shown[-1].count("tokens computed, 123.40 s") == 2
    assert "".join(line.split("│")[1].strip() for line in shown[1:-1]) == text


# ---- The live parts, on the real model ---------------------------------------------------------


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Live:
    """Return a function that runs a demo by default, without its comparisons. It returns stdout."""

    def run(name: str, *compared: str) -> str:
        demo = load(name, "demo")
        for function in compared:
            monkeypatch.setattr(demo, function, lambda *_: {})
        monkeypatch.setattr(sys, "argv", ["demo", "--plain"])
        demo.main()
        return capsys.readouterr().out

    return run


@pytest.mark.thorough("a demo on the real model")
@pytest.mark.since("m3_paged")
@pytest.mark.before("m4_radix")
def test_the_live_demo_of_pages_retracts(live: Live, milestone: str) -> None:
    shown = live(milestone, "run_milestones", "comparison")
    assert shown.count("is retracted: it waits to be computed again") >= 1


@pytest.mark.thorough("a demo on the real model")
@pytest.mark.since("m4_radix")
@pytest.mark.before("m5_overlap")
def test_the_live_demo_of_the_tree_evicts(
    live: Live, milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo, opened = load(milestone, "demo"), list[Any]()

    def panels(*args: Any) -> Any:
        opened.append(kept(*args))
        return opened[-1]

    kept = demo.Panels
    monkeypatch.setattr(demo, "Panels", panels)
    live(milestone, "run_milestones", "comparison", "compare_policies")
    [shown] = opened
    assert shown.num_evicted > 0
    assert f"pages evicted: {shown.num_evicted}" in str([*shown()][-1])
