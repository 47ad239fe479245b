"""Numbers in the handouts agree with the table, the recorded run or the command they come from.

Of what `measure` shows, all counters are compared, and times are not.
"""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from common import EMBEDDED_MODEL
from milestones.chain import course_place, is_elective, short
from milestones.course import catalog
from milestones.course.student import measure
from milestones.course.student.measure import MEASUREMENTS
from milestones.course.student.measuring import TINY, Row
from milestones.lab.bench.host_time import MILESTONES, SIZES
from milestones.lab.bench.workloads import WORKLOADS
from slides.facts import recorded
from tests.conftest import ROOT
from tests.helpers.mini_course import called

HANDOUTS = ROOT / "milestones"
DOCS = HANDOUTS / "docs"
GAPS = r"With (\d+) requests, that gap is (\d+) µs .*?in this milestone it is (\d+) µs"
NUM_REQUESTS = 32  # of the table of multi_step
TOKENS = r"computes (\d+) prompt tokens, and it has computed (\d+) of them before"


MEAN_GAPS = r"two forwards is ([\d.]+) ms in the serial loop and ([\d.]+) ms in the overlapped one"
STEP = r"overlapped loop needs ([\d.]+) ms for a step, and the serial loop ([\d.]+) ms"


def handout(milestone: str) -> str:
    return (ROOT / course_place(milestone) / "README.md").read_text(encoding="utf-8")


def table(text: str, header: str) -> list[dict[str, str]]:
    """Return the rows of the table that begins with these cells, by column name."""
    lines = text[text.index(f"\n{header}") + 1 :].partition("\n\n")[0].splitlines()
    names, _rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows]


def numbers(pattern: str, text: str) -> list[str]:
    """Return the numbers that a sentence of a handout gives, wherever its lines break."""
    found = re.findall(pattern, " ".join(text.split()))
    assert len(found) == 1, f"the sentence {pattern!r} is in the handout {len(found)} times"
    return list(found[0])


def test_the_table_of_host_times_is_of_the_recorded_run() -> None:
    """`host-time --json milestones/docs/results/host_time.json` writes the run."""
    recorded = json.loads((DOCS / "results/host_time.json").read_text(encoding="utf-8"))
    shown = {row["running"]: row for row in table(handout("m5_overlap"), "| running |")}
    assert list(shown) == [str(size) for size in SIZES]
    paused = [run for run in recorded["microseconds"] if run["pause_ms"]]
    assert len(paused) == len(MILESTONES) * len(SIZES)
    for run in paused:
        row = shown[str(run["num_running"])]
        for what in ("host", "gap"):
            column = f"{run['milestone'][:2]} {what}"
            assert row[column] == f"{run[what]:.0f}", f"{column}, {run['num_running']} running"


def test_the_table_of_stored_weights_is_of_the_recorded_run() -> None:
    """`bench --json milestones/docs/results/stored.json` writes it, and keeps other workloads."""
    recorded = json.loads((DOCS / "results/stored.json").read_text(encoding="utf-8"))["engines"]
    rows = table((DOCS / "SPEED.md").read_text(encoding="utf-8"), "| engine | alone | 16 at")
    assert [row["engine"] for row in rows] == list(recorded)
    columns = ("alone", "16 at once", "mixed lengths", "shared prompts", "conversations")
    for row in rows:
        for column, workload in zip(columns, WORKLOADS, strict=False):
            measured = recorded[row["engine"]].get(workload)
            shown = f"{measured['tokens_per_second']:.1f}" if measured else "-"
            assert row[column] == shown, f"{row['engine']}, {column}"


def test_the_tables_of_other_engines_are_of_the_recorded_runs() -> None:
    """`bench --json` writes them, quiet and with `--beside 1`."""

    def engines_of(name: str) -> Any:
        return json.loads((DOCS / f"results/{name}.json").read_text(encoding="utf-8"))["engines"]

    page, quiet = (DOCS / "SPEED.md").read_text(encoding="utf-8"), engines_of("peers")
    rows = table(page, "| engine | alone | m4 against it")
    assert [row["engine"] for row in rows] == list(quiet)
    busy = engines_of("peers_beside")
    beside = table(page, "| beside a loop")
    assert [row["beside a loop"] for row in beside] == list(busy)
    for column, workload in (("alone", "alone"), ("16 at once", "batch")):
        speed = {name: found[workload]["tokens_per_second"] for name, found in quiet.items()}
        for row in rows:
            assert row[column] == f"{speed[row['engine']]:.1f}", row["engine"]
        for row in beside:
            name = row["beside a loop"]
            now = busy[name][workload]["tokens_per_second"]
            assert row[column] == f"{now:.0f} ({now / speed[name]:.2f})", name


def test_the_goodput_is_of_the_recorded_run() -> None:
    """`load --engines` writes it. A rate that an engine did not get is a dash."""
    recorded = json.loads((DOCS / "results/load.json").read_text(encoding="utf-8"))["engines"]
    rows = table((DOCS / "SERVING.md").read_text(encoding="utf-8"), "| engine | 1 request/s")
    assert [row["engine"] for row in rows] == list(recorded)
    for row in rows:
        shown = [cell for name, cell in row.items() if name != "engine"]
        found = [f"{measured['goodput']:.2f}" for measured in recorded[row["engine"]]]
        assert shown == found + ["-"] * (len(shown) - len(found)), row["engine"]


def test_the_gaps_of_m5_1_are_those_of_the_table() -> None:
    text = handout("m5_overlap")
    size, below, here = numbers(GAPS, text)
    [row] = [row for row in table(text, "| running |") if row["running"] == size]
    assert (below, here) == (row["m4 gap"], row["m5 gap"])


def test_the_lanes_of_m5_are_those_of_the_slides() -> None:
    """One experiment has one number everywhere: the handout reads the run of the slides."""
    run = recorded("m5_lanes")
    steps = [f"{run[loop]['step_ms']:.1f}" for loop in ("overlapped", "serial")]
    assert numbers(STEP, handout("m5_overlap")) == steps
    gaps = [mean(_gaps(run[loop]["forward"])) for loop in ("serial", "overlapped")]
    assert numbers(MEAN_GAPS, handout("m5_overlap")) == [f"{gap:.2f}" for gap in gaps]


def _gaps(forwards: list[dict[str, float]]) -> list[float]:
    """Return the milliseconds between each forward and the next one."""
    return [after["start"] - before["end"] for before, after in pairwise(forwards)]


def test_the_tables_of_multi_step_agree_with_their_prose() -> None:
    """The shares of the table follow from its counts. The times of its prose are rounded ratios."""
    text = " ".join(handout("multi_step").split())
    shown = table(handout("multi_step"), "| steps per plan |")
    rows = {row["steps per plan"]: row for row in shown}
    for row in rows.values():
        tokens, vain = int(row["tokens"]), int(row["in vain"])
        assert row["share"] == f"{vain / (tokens + vain):.1%}"
    below, longest = rows["m5, overlapped"], rows["8"]
    assert "computes four times as many tokens in vain as m5" in text
    assert round(int(longest["in vain"]) / int(below["in vain"])) == 4
    assert "waits more than twice as long for its first token" in text
    assert 2 < float(longest["TTFT p50, ms"]) / float(below["TTFT p50, ms"]) < 3
    assert f"The measured share is {float(longest['share'][:-1]):.0f}%" in text
    assert f"have {int(below['tokens']) / NUM_REQUESTS:.0f} tokens on average" in text
    assert "3.5 in 27.5: 13%" in text and sum(range(8)) / 8 == 3.5
    assert "m5 computes one, 4%" in text
    assert (round(100 * 3.5 / 27.5), round(100 / 25)) == (13, 4)


def test_the_tokens_of_m4_1_are_those_of_the_table() -> None:
    """The prompt tokens that m3 computes are those that m4 computes and those that it reuses."""
    text = handout("m4_radix")
    computed, reused = table(text, "| | m3_paged |")
    assert numbers(TOKENS, text) == [computed["m3_paged"], reused["m4_radix"].split()[0]]
    total, again = int(computed["m3_paged"]), int(reused["m4_radix"].split()[0])
    assert int(computed["m4_radix"]) + again == total
    assert reused["m4_radix"] == f"{again} ({again / total:.0%})"


@pytest.mark.parametrize(("header", "electives"), [("| week |", False), ("| elective |", True)])
def test_points_and_hours_of_the_course_are_those_of_the_exercises(
    header: str, electives: bool
) -> None:
    rows = table((HANDOUTS / "README.md").read_text(encoding="utf-8"), header)
    shown = [(float(row["points"]), float(row["hours"])) for row in rows]
    wanted = [name for name in catalog.taught_engines(ROOT) if is_elective(name) == electives]
    courses = [catalog.load(name) for name in wanted]
    assert shown == [(sum(e.points for e in c), sum(e.hours for e in c)) for c in courses]


@pytest.mark.parametrize("wrong", ["750 µs", "43 µs"])
def test_a_gap_that_is_not_in_the_table_is_seen(wrong: str) -> None:
    """The pattern reads the whole number, and the sentence must be there."""
    sentence = f"With 16 requests, that gap is {wrong} per step; in this milestone it is 91 µs."
    assert numbers(GAPS, sentence) == ["16", wrong.split()[0], "91"]
    with pytest.raises(AssertionError, match="0 times"):
        numbers(GAPS, sentence.replace("gap", "time"))


def rows(milestone: str, *sizes: float) -> list[Row]:
    chosen = MEASUREMENTS[short(milestone)]
    model = TINY if chosen.model == EMBEDDED_MODEL else chosen.model
    return list(chosen.rows(milestone, model, sizes or chosen.sizes))


@pytest.mark.thorough("it measures whole tables")
@pytest.mark.parametrize("name", [
    "m3_paged", "m4_radix", "priority", "agents", "disaggregated", "embedding", "hybrid_memory",
    "kv_quant",
])  # fmt: skip
def test_the_counters_are_those_of_the_handout(name: str) -> None:
    columns = MEASUREMENTS[short(name)].columns
    shown = table(handout(name), f"| {columns[0]} | {columns[1]} |")
    assert [tuple(row.values()) for row in shown] == rows(name)
    assert tuple(shown[0]) == columns


def test_static_batches_are_those_of_the_handout() -> None:
    found = {
        row[1]: row[2:4] for row in measure.MORE["static"][2].rows("m2_continuous", TINY, (6,))
    }
    shown = table(handout("m2_continuous"), "| | forwards |")
    static, continuous = ([*row.values()][1:3] for row in shown[1:])
    assert found == {"static": tuple(static), "continuous": tuple(continuous)}


def test_the_workload_of_m3_is_that_of_the_handout() -> None:
    """So are the first rows of `--workload`, with two runs of four."""
    *_, chosen = measure.MORE["workload"]
    found = list(chosen.rows("m3_paged", chosen.model, (24,)))
    first = table(handout("m3_paged"), "| | forwards | padding computed |")
    assert [[*row.values()][1:5] for row in first] == [[*row[1:5]] for row in found]
    assert [[*row.values()][5] for row in first] == [row[5].partition(",")[0] for row in found]
    assert "retracts one request, after step 100" in " ".join(handout("m3_paged").split())
    assert [row[5] for row in found] == ["0", "1, after 100"]


@pytest.mark.thorough("it measures whole tables")
@pytest.mark.parametrize(("name", "option"), [("m3_paged", "chunks"), ("m4_radix", "shared")])
def test_other_counters_are_those_of_the_handout(name: str, option: str) -> None:
    *_, chosen = measure.MORE[option]
    shown = table(handout(name), f"| {chosen.columns[0]} | {chosen.columns[1]} |")
    assert [tuple(row.values()) for row in shown] == list(
        chosen.rows(name, chosen.model, chosen.sizes)
    )


def test_the_tokens_that_m1_feeds_are_those_of_the_handout() -> None:
    found = rows("m1_single", 16, 480)
    assert [(context, cached, plain) for context, cached, _, plain, _ in found] == [
        ("16", "1.0", "18.5"), ("480", "1.0", "482.5"),
    ]  # fmt: skip
    text = handout("m1_single").partition("## Measure it")[2]
    assert "18.5 on average for n = 16, and 482.5 for n = 480" in " ".join(text.split())


@pytest.mark.thorough("it measures a whole table")
def test_the_steps_of_speculative_are_those_of_the_handout() -> None:
    """The counters of one request are the same on every machine. Sixteen requests never draft.

    The number of steps of sixteen requests is not compared: a crowded machine took three more.
    """
    chosen = MEASUREMENTS["speculative"]
    columns = chosen.columns[:6]
    shown = [tuple(row.values()) for row in table(handout("speculative"), "| text | requests |")]
    found = [row[:6] for row in chosen.rows("speculative", chosen.model, (1,))]
    assert found == [row for row in shown if row[1] == "1"]
    assert tuple(table(handout("speculative"), "| text | requests |")[0]) == columns
    sixteen = [(*row[:2], *row[4:6]) for row in rows("speculative", 16)]
    assert sixteen == [(*row[:2], *row[4:6]) for row in shown if row[1] == "16"]


@pytest.mark.parametrize(("name", "size"), [("m2_continuous", 2), ("m5_overlap", 1)])
def test_times_are_measured(name: str, size: float) -> None:
    [row] = rows(name, size)
    assert len(row) == len(MEASUREMENTS[name.partition("_")[0]].columns)
    assert row[0] == f"{size:g}" and all(float(cell) > 0 for cell in row)


@pytest.mark.parametrize("name", catalog.taught_engines(ROOT))
def test_every_handout_asks_before_it_measures(name: str) -> None:
    text = handout(name).partition("\n## Measure it\n")[2].partition("\n## ")[0]
    assert text.index("**Predict.**") < text.index("**Measure.**") < text.index("<details>")
    assert f"python -m milestones measure {short(name)}" in text


def test_the_command_shows_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MEASUREMENTS["m4"]
    changed = dataclasses.replace(small, sizes=(32,))
    monkeypatch.setitem(MEASUREMENTS, "m4", changed)
    assert called(measure, ROOT, "m4") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "49%" in shown and shown.endswith(small.conclusion)
    assert called(measure, ROOT, "m4", "--static") == 2
    assert called(measure, ROOT, "m9") == 2
    assert "there is no milestone 'm9'" in capsys.readouterr().err
