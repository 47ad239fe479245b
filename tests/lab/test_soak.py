"""The soak: its expected answers are right, and it finds planted bugs but none in the engines."""

from __future__ import annotations

import argparse
import math
import random
import threading
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common import SamplingParams
from common.guard import Caller, Guard
from common.sampling.draws import uniform
from milestones.chain import at_least, load
from milestones.lab.instruments import hash_chain
from milestones.lab.instruments.audit import MODES
from milestones.lab.soak import command as soak
from milestones.lab.soak import faults, interrupts, results, runner
from milestones.lab.soak.answers import HashSource
from milestones.lab.soak.extras import EXTRAS, GRAMMARS, PLAIN
from milestones.lab.soak.interrupts import Interrupter
from milestones.lab.soak.matrix import FaultMatrix
from milestones.lab.soak.parts import KINDS, MAY_DIE, MAY_END, parts_of
from milestones.lab.soak.plan import PAGE_SIZES, make_plan
from milestones.lab.soak.results import Results, Tally
from milestones.lab.soak.runner import Soak
from milestones.lab.soak.tiny_answers import Sources
from tests.conftest import MILESTONES, build_engine
from tests.helpers.oracle import greedy, reference
from tests.helpers.planted_bugs import BUGS

# An interrupt may hit a callback of the garbage collector. Python then only reports its exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SEED = 13  # with it, 16 schedules of each engine have every kind of attack,
MATRIX_SEED = 11  # and with this one, 60 schedules reach each part
WITH_GRAMMARS = "structured_output"  # the elective that needs the extra `grammar`
HAS_GRAMMARS = find_spec("llguidance") is not None
SCHEDULES = 16  # of each engine


@pytest.mark.thorough("seconds on each engine", fast_on=("m5_overlap",))
def test_nothing_is_wrong(milestone: str) -> None:
    """A short run of `python -m milestones soak`, with all kinds of attacks, finds no bug."""
    run = Soak(SEED, [milestone])
    assert list(run.run(iter(range(SCHEDULES)))) == list(range(SCHEDULES))
    run.measure_memory()
    assert not run.results.failed, run.results.failed
    assert not run.results.leaks
    (tally,) = run.results.milestones().values()
    assert tally.schedules == SCHEDULES and tally.requests > 50 and tally.tokens > 200
    for attack in ("aborts", "refusals", "failures", "errors", "interrupts"):
        assert getattr(tally, attack) > 0, f"this run has no {attack}"
    if at_least(milestone, "m3_paged"):
        assert tally.retractions > 0, "this run has no retractions"
    if milestone in EXTRAS or milestone == "speculative":
        assert tally.extras > 10, "this run has nothing of what the elective adds"
    if runner.has_stream(milestone):
        assert set(run.results.lanes) == {f"{milestone} {mode}" for mode in MODES}


MANY = pytest.mark.thorough("up to a hundred schedules for each bug")


def marked(name: str) -> Any:
    """Return a planted bug with the marks of its test: those of electives are thorough."""
    milestone = BUGS[name].milestone
    is_quick = milestone in MILESTONES and name != "a_prompt_that_waits_for_ever"
    grammar = [pytest.mark.extra("grammar")] * (milestone == WITH_GRAMMARS)
    return pytest.param(name, marks=grammar if is_quick else [*grammar, MANY])


@pytest.mark.parametrize("name", [marked(name) for name in sorted(BUGS)])
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak finds the bug, and the schedule in the printed command finds it again."""
    planted = BUGS[name]
    planted.plant(monkeypatch)
    attacks = {"interrupts": planted.interrupts, "failures": planted.failures}
    found = Soak(0, [planted.milestone], **attacks)
    for _ in found.run(iter(range(planted.at, planted.at + 100))):
        if found.results.failed:
            break
    (failed,) = found.results.failed
    assert failed.message.startswith(planted.kind), failed.message
    assert f"--seed 0 --milestone {planted.milestone}" in failed.command
    if not planted.interrupts:
        again = Soak(0, [planted.milestone], **attacks)
        list(again.run(iter([failed.number])))
        assert len(again.results.failed) == 1


@pytest.mark.thorough("a failure at each part of a step")
def test_every_part_fails(milestone: str) -> None:
    """Each part of a step fails, once and lastingly, and the engine does what it must.

    If a name in the table of parts is wrong, no schedule reaches the part, and this test fails.
    """
    run = FaultMatrix(MATRIX_SEED, [milestone], most=1)
    cells = {
        (part, kind): f"{milestone} {part} {kind}"
        for part in parts_of(milestone)
        for kind in KINDS
        if HAS_GRAMMARS or part not in ("masks", "compile")
    }
    for _ in run.run(iter(range(60))):
        if all(run.results.cells.get(name) for name in cells.values()):
            break
    assert not run.results.failed, run.results.failed
    for (part, kind), name in cells.items():
        outcomes = set(run.results.cells[name])
        allowed = {"dead"} if part in MAY_DIE else {"again", "ends"}
        if kind == "once" and part not in MAY_DIE | MAY_END:
            allowed = {"again"}
        assert outcomes and outcomes <= allowed, f"{name}: {outcomes}"


@pytest.mark.thorough("a failure at each part of a step")
def test_the_matrix_finds_a_planted_bug(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the matrix, writes it into a page, and repeats a schedule of it."""
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- faults -->\nold\n<!-- /faults -->\nAfter.\n")
    words = ["--faults", "sample", "table", "--seed", "0", "--milestone", "m4"]
    assert soak.main(arguments(*words, "--schedules", "3", "--report", str(page))) == 0
    assert "| engine | table | sample |" in page.read_text()
    assert "| m4_radix | again, ends | again, ends |" in page.read_text()
    capsys.readouterr()
    core = load("m4_radix", "engine").EngineCore
    monkeypatch.setattr(core, "send_back", lambda self: None)
    assert soak.main(arguments(*words, "--schedule", "0")) == 1
    told = capsys.readouterr().out
    assert "wrong" in told
    assert "--seed 0 --milestone m4_radix --schedule 0 --faults table" in told


@pytest.mark.thorough("two runs on each engine", fast_on=("m5_overlap",))
def test_a_run_without_interrupts_repeats_itself(milestone: str) -> None:
    """All figures except times and memory depend only on the seed.

    If a part fails on a real forward thread, they also depend on how far the host has got by then.
    So the first schedule runs without failures, because only that one has such a thread.
    """
    figures = []
    for _ in range(2):
        run = Soak(SEED, [milestone], interrupts=False, failures=False)
        list(run.run(iter([0])))
        run.failures = True
        list(run.run(iter(range(1, 4))))
        lanes = run.results.lanes.values()
        figures.append([(t.steps, t.tokens, t.retractions, t.errors, t.failures) for t in lanes])
    assert figures[0] == figures[1]


@pytest.mark.parametrize("kind", ["timer", "ctrl_c"])
def test_interrupts_arrive(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each interrupt arrives once, inside the call. No signal arrives after the call."""
    interrupter = interrupts.Interrupter()
    monkeypatch.setattr(interrupter, f"_arm_{'timer' if kind == 'ctrl_c' else 'ctrl_c'}",
                        getattr(interrupter, f"_arm_{kind}"))  # fmt: skip
    with interrupter.handling():
        results = [interrupter.call(random.Random(number), busy) for number in range(30)]
        time.sleep(0.01)
    # An interrupt that arrives before the call begins is ignored, and the call runs to its end.
    assert set(results) <= {(None, True), (100_000, False)}
    assert interrupter.delivered == sum(hit for _, hit in results) > 0
    assert not interrupter.stop_requested


def busy() -> int:
    """Call functions for longer than any interrupt takes to arrive."""
    return sum(nothing() for _ in range(100_000))


def nothing() -> int:
    return 1


def test_a_ctrl_c_at_any_call_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak sends no Ctrl-C where Python would handle none: when the guard has just ended."""
    interrupter, caller = Interrupter(), Caller()
    monkeypatch.setattr(Interrupter, "_arm_timer", Interrupter._arm_ctrl_c)
    monkeypatch.setattr(random.Random, "uniform", lambda _, low, high: high)
    outcomes = set[str]()

    def step() -> list[int]:
        with Guard(caller, "step", lambda: None) as call:
            began.append(True)
            return call.keep([1])

    with interrupter.handling():
        for count in range(1, 500):  # more events than the call has
            began: list[bool] = []
            caller.undelivered = None
            monkeypatch.setattr(interrupts, "MOST_EVENTS", math.log10(count + 0.5))
            value, hit = interrupter.call(random.Random(0), step)
            kept = [1] if not hit else caller.undelivered and caller.undelivered[1]
            assert kept == ([1] if began else None), f"event {count}: the result is lost"
            outcomes.add("returned" if value else "kept" if began else "not begun")
    assert outcomes == {"not begun", "kept", "returned"}


def test_a_leak_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100.0, 100.0 + runner.MOST_GROWTH_MB + 1])
    monkeypatch.setattr(runner, "resident_mb", lambda: next(sizes))
    run = Soak(SEED, ["m1_single"], interrupts=False)
    run.results.lanes["m1_single"] = Tally(schedules=5, memory_start_mb=runner.resident_mb())
    run.measure_memory()
    assert "301 MB" in run.results.leaks[0]


def test_a_schedule_that_hangs_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A timer prints its command and the stacks of all threads, and ends the process."""
    ended = threading.Event()
    monkeypatch.setattr(runner.os, "_exit", lambda status: ended.set())
    with runner.watched("the command of the schedule", seconds=0.01):
        assert ended.wait(timeout=60)
    monkeypatch.setattr(runner.os, "_exit", lambda status: pytest.fail("it had ended in time"))
    with runner.watched("the command of the schedule", seconds=60):
        pass
    assert not any(isinstance(t, threading.Timer) for t in threading.enumerate())
    told = capfd.readouterr().err
    assert "the command of the schedule" in told and "test_a_schedule_that_hangs" in told


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- soak -->\nold\n<!-- /soak -->\nAfter.\n")
    words = ["--schedules", "3", "--seed", "1", "--milestone", "m2", "--no-interrupts"]
    assert soak.main(arguments(*words, "--report", str(page))) == 0
    told, text = capsys.readouterr().out, page.read_text()
    assert text.startswith("Before.\n<!-- soak -->\nSeed 1, 3 schedules, ")
    assert text.endswith("-->\nAfter.\n")
    assert "old" not in text and "Nothing is wrong." in text
    (row,) = [line for line in text.splitlines() if line.startswith("| m2_continuous | 3 |")]
    for shown in row.strip("| ").split(" | "):
        assert f" {shown} " in told.replace("\n", " ")


@pytest.mark.thorough("two processes")
def test_processes_share_the_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes run the same schedules as one, and their figures are added up."""
    words = ["--schedules", "4", "--seed", "1", "--milestone", "m2", "--no-interrupts"]
    tables = []
    for jobs in ("1", "2"):
        assert soak.main(arguments(*words, "--jobs", jobs)) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "│ m2_con" in line]
        tables.append(row.split("│")[1:12])  # the rest are problems, times and memory
    assert tables[0] == tables[1] and tables[0][1].strip() == "4"


def test_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a bug, the command exits with 1 and says how to run the schedule again."""
    BUGS["a_row_moved_one_token_short"].plant(monkeypatch)
    words = ["--schedules", "5", "--seed", "0", "--milestone", "m2", "--no-interrupts"]
    assert soak.main(arguments(*words)) == 1
    told = capsys.readouterr().out
    assert "I1" in told
    assert "python -m milestones soak --seed 0 --milestone m2_continuous --schedule" in told


@pytest.mark.parametrize("words", [["--milestone", "m9"], ["--schedule", "3"]], ids=str)
def test_a_wrong_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(arguments(*words)) == 2
    assert "m1_single" in capsys.readouterr().out or "--seed" in words or words[0] == "--schedule"


def test_figures_add_up() -> None:
    found = Results()
    for lane, tokens in (("m5_overlap early", 3), ("m5_overlap late", 4), ("m1_single", 5)):
        found.lanes[lane] = Tally(tokens=tokens, memory_start_mb=tokens, memory_end_mb=tokens)
    assert {name: t.tokens for name, t in found.milestones().items()} == {
        "m5_overlap": 7, "m1_single": 5,
    }  # fmt: skip
    assert [row[0] for row in results.rows(found)] == [
        "m5_overlap early", "m5_overlap late", "m5_overlap", "m1_single", "all",
    ]  # fmt: skip


# ---- Plans and expected answers, computed without an engine -------------------------------------


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def test_the_seed_decides_the_schedule(sources: Sources) -> None:
    plans = [repr(make_plan(1, number, sources)) for number in range(6)]
    assert plans == [repr(make_plan(1, number, sources, "m5_overlap")) for number in range(6)]
    others = [repr(make_plan(2, number, sources)) for number in range(6)]
    assert len({*plans, *others}) == 12


def test_the_random_numbers_of_the_sampler() -> None:
    """The soak's random numbers, in plain Python, have the same bits as the sampler's."""
    chance = random.Random(0)
    cases = [(chance.getrandbits(64) - 2**63, chance.randrange(5000)) for _ in range(200)]
    cases += [(0, 0), (-(2**63), 1), (2**63 - 1, 2**31)]
    seeds, positions = (np.array(column) for column in zip(*cases, strict=True))
    expected = uniform(seeds, positions).tolist()
    assert [hash_chain.uniform(*case) for case in cases] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"min_p": 0.05}], ids=str)
def test_the_answers_of_the_hash_model(temperature: float, filters: dict[str, Any]) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=temperature, seed=5, logprobs=0, ignore_eos=True, **filters
    )
    source = HashSource()
    engine = build_engine("m1_single", source.loaded)
    for prompt in ([5], [1, 2, 3], [250] * 17):
        expected = source.continuation(prompt, params, 20)
        got = engine.generate(prompt, params)[0].outputs[0]
        assert len(expected.token_ids) == 20 and got.token_ids == expected.token_ids
        chosen = [row[t] for row, t in zip(got.logprobs or [], got.token_ids, strict=True)]
        assert chosen == pytest.approx(expected.logprobs, abs=1e-5)
    engine.close()


def test_the_answers_of_a_tiny_model(sources: Sources) -> None:
    """Greedy answers are those of Hugging Face's `generate`, up to the first tie of logits."""
    prompt = [3, 1, 4, 1, 5]
    tokens = sources["tiny-llama"].continuation(prompt, greedy(12), 12).token_ids
    assert len(tokens) > 4
    assert tokens == reference("tiny-llama", tuple(prompt), 12).token_ids[: len(tokens)]


def test_where_an_answer_ends(sources: Sources) -> None:
    source = sources["hash"]
    ids = [ord(c) - ord("!") for c in "abcdef"]  # ids of the byte tokenizer
    text = source.text_of(ids, SamplingParams())
    assert source.ending(ids, greedy(6)).finish_reason == "length"
    assert source.ending(ids, greedy(6), limit=2).token_ids == ids[:2]
    stopped = source.ending(ids, greedy(6, stop=text[2:4]))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (text[:2], ids[:4], "stop")
    by_token = source.ending(ids, greedy(6, stop_token_ids=[ids[3]]))
    assert (by_token.text, by_token.token_ids) == (text[:3], ids[:4])


@pytest.mark.thorough("hundreds of plans")
def test_plans_draw_what_an_elective_adds(milestone: str, sources: Sources) -> None:
    """Together with n, page sizes from 1 to 64, and pools from barely enough to ample."""
    plans = [make_plan(3, number, sources, milestone) for number in range(80)]
    requests = [r for plan in plans for arrival in plan.arrivals for r in arrival.requests]
    assert {plan.config["page_size"] for plan in plans} == {*PAGE_SIZES}
    assert {len(r.answers) for r in requests} >= {1, 2, 3}
    for request in requests:
        assert all(answer.token_ids for answer in request.answers)
    extra = [request for request in requests if request.extra != PLAIN]
    adds = milestone in EXTRAS and (milestone != WITH_GRAMMARS or HAS_GRAMMARS)
    assert bool(extra) == adds
    assert len({repr(request.extra) for request in extra}) >= 4 or not extra


@pytest.mark.parametrize("params", [greedy(30), SamplingParams(max_tokens=30, seed=5)], ids=str)
def test_the_answers_under_a_grammar(params: SamplingParams) -> None:
    """Each answer is one of the strings of its grammar, and then an end token."""
    source, texts = HashSource(), set[str]()
    for wanted, strings in GRAMMARS.items():
        for prompt in ([5], [1, 2, 3], [250] * 17):
            asked = replace(params, structured_outputs=wanted)
            answer = source.continuation(prompt, asked, 30)
            text = source.ending(answer.token_ids, asked).text
            assert answer.is_whole and text in strings
            texts.add(text)
    assert len(texts) >= len(GRAMMARS) + (not params.is_greedy)


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"logits_to_keep": 1}, [4]),
        ({"logits_to_keep": torch.tensor([1, 3])}, [1, 3]),
        ({"logits_to_keep": 0, "tokens_to_keep": torch.tensor([1, 3])}, [1, 3]),
        ({"logits_to_keep": 0, "tokens_to_keep": slice(-2, None)}, [3, 4]),
    ],
)
def test_a_row_of_logits_is_broken_where_its_token_is(
    kwargs: dict[str, Any], kept: list[int]
) -> None:
    """The pass that trims the last layer renames the tokens that get logits."""
    forward = {"input_ids": torch.zeros(1, 5, dtype=torch.int64), **kwargs}
    assert faults._kept_tokens(forward).tolist() == kept
