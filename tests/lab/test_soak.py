"""The soak: its expected answers are right, and it finds planted bugs but none in the engines."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common import SamplingParams
from common.sampling.sampler import uniform
from milestones import soak
from milestones.chain import at_least
from milestones.instruments.audit import MODES
from milestones.soak import answers, faults, interrupts, report, runner, watchdog
from milestones.soak.answers import HashSource, Source, TinySource
from milestones.soak.plan import make_plan
from milestones.soak.runner import Soak
from milestones.soak.tally import Results, Tally
from tests.conftest import build_engine
from tests.helpers.oracle import greedy, reference
from tests.helpers.planted_bugs import BUGS

# An interrupt may hit a callback of the garbage collector. Python then only reports its exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SEED = 11
SCHEDULES = 16  # of each milestone: about two seconds


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {
        "hash": HashSource(),
        "tiny-llama": TinySource("tiny-llama"),
        "tiny-qwen3": TinySource("tiny-qwen3"),
    }


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
    if runner.has_stream(milestone):
        assert set(run.results.lanes) == {f"{milestone} {mode}" for mode in MODES}


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soak finds the bug, and the schedule in the printed command finds it again."""
    planted = BUGS[name]
    planted.plant(monkeypatch)
    attacks = {"interrupts": planted.interrupts, "failures": planted.failures}
    found = Soak(planted.seed, [planted.milestone], **attacks)
    for _ in found.run(iter(planted.schedules)):
        if found.results.failed:
            break
    (failed,) = found.results.failed
    assert failed.message.startswith(planted.kind), failed.message
    assert f"--seed {planted.seed} --milestone {planted.milestone}" in failed.command
    if not planted.interrupts:
        again = Soak(planted.seed, [planted.milestone], **attacks)
        list(again.run(iter([failed.number])))
        assert len(again.results.failed) == 1


def test_the_seed_decides_the_schedule(sources: dict[str, Source]) -> None:
    plans = [repr(make_plan(1, number, sources)) for number in range(6)]
    assert plans == [repr(make_plan(1, number, sources)) for number in range(6)]
    others = [repr(make_plan(2, number, sources)) for number in range(6)]
    assert len({*plans, *others}) == 12


def test_a_run_without_interrupts_repeats_itself(milestone: str) -> None:
    """All figures except times and memory depend only on the seed."""
    figures = []
    for _ in range(2):
        run = Soak(SEED, [milestone], interrupts=False)
        list(run.run(iter(range(3))))
        lanes = run.results.lanes.values()
        figures.append([(t.steps, t.tokens, t.retractions, t.errors, t.failures) for t in lanes])
    assert figures[0] == figures[1]


def test_the_random_numbers_of_the_sampler() -> None:
    """The soak's random numbers, in plain Python, have the same bits as the sampler's."""
    chance = random.Random(0)
    cases = [(chance.getrandbits(64) - 2**63, chance.randrange(5000)) for _ in range(200)]
    cases += [(0, 0), (-(2**63), 1), (2**63 - 1, 2**31)]
    seeds, positions = (torch.tensor(column) for column in zip(*cases, strict=True))
    expected = uniform(seeds, positions).tolist()
    assert [answers.uniform(*case) for case in cases] == expected


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


def test_the_answers_of_a_tiny_model(sources: dict[str, Source]) -> None:
    """Greedy answers are those of Hugging Face's `generate`, up to the first tie of logits."""
    prompt = [3, 1, 4, 1, 5]
    tokens = sources["tiny-llama"].continuation(prompt, greedy(12), 12).token_ids
    assert len(tokens) > 4
    assert tokens == reference("tiny-llama", tuple(prompt), 12).token_ids[: len(tokens)]


def test_where_an_answer_ends(sources: dict[str, Source]) -> None:
    source = sources["hash"]
    ids = [ord(c) - ord("!") for c in "abcdef"]  # ids of the byte tokenizer
    text = source.text_of(ids, SamplingParams())
    assert source.ending(ids, greedy(6)).finish_reason == "length"
    assert source.ending(ids, greedy(6), limit=2).token_ids == ids[:2]
    stopped = source.ending(ids, greedy(6, stop=text[2:4]))
    assert (stopped.text, stopped.token_ids, stopped.finish_reason) == (text[:2], ids[:4], "stop")
    by_token = source.ending(ids, greedy(6, stop_token_ids=[ids[3]]))
    assert (by_token.text, by_token.token_ids) == (text[:3], ids[:4])


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
    """The watchdog prints its command and the stacks of all threads, and ends the process."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda status: ended.set())
    dog = watchdog.Watchdog(seconds=0.01)
    with dog.watching():
        dog.tell("the command of the schedule")
        assert ended.wait(timeout=60)
        dog.tell(None)
    told = capfd.readouterr().err
    assert "the command of the schedule" in told and "test_a_schedule_that_hangs" in told


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("Before.\n<!-- soak -->\nold\n<!-- /soak -->\nAfter.\n")
    words = ["--schedules", "3", "--seed", "1", "--milestone", "m2", "--no-interrupts"]
    assert soak.main(arguments(*words, "--json", str(figures), "--report", str(page))) == 0
    told, written = capsys.readouterr().out, json.loads(figures.read_text())
    tally = written["milestones"]["m2_continuous"]
    assert tally["schedules"] == 3 and written["seed"] == 1 and not written["failed"]
    text = page.read_text()
    assert text.startswith("Before.\n<!-- soak -->\nSeed 1, ") and text.endswith("-->\nAfter.\n")
    assert "old" not in text and "Nothing is wrong." in text
    for shown in (told, text):
        assert f" {tally['tokens']:,} " in shown and "m2_continuous" in shown


def test_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a bug, the command exits with 1 and says how to run the schedule again."""
    BUGS["a_row_moved_one_token_short"].plant(monkeypatch)
    words = ["--schedules", "3", "--seed", "0", "--milestone", "m2", "--no-interrupts"]
    assert soak.main(arguments(*words)) == 1
    told = capsys.readouterr().out
    assert "I1" in told
    assert "python -m milestones soak --seed 0 --milestone m2_continuous --schedule" in told


@pytest.mark.parametrize("words", [["--milestone", "m9"], ["--schedule", "3"]], ids=str)
def test_a_wrong_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(arguments(*words)) == 2
    assert "m1_single" in capsys.readouterr().out or "--seed" in words or words[0] == "--schedule"


def test_figures_add_up() -> None:
    results = Results()
    for lane, tokens in (("m5_overlap early", 3), ("m5_overlap late", 4), ("m1_single", 5)):
        results.lanes[lane] = Tally(tokens=tokens, memory_start_mb=tokens, memory_end_mb=tokens)
    assert {name: t.tokens for name, t in results.milestones().items()} == {
        "m5_overlap": 7, "m1_single": 5,
    }  # fmt: skip
    assert [row[0] for row in report.rows(results)] == [
        "m5_overlap early", "m5_overlap late", "m5_overlap", "m1_single", "all",
    ]  # fmt: skip


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
