"""`measure` shows what the handouts say: all counters are compared, and times are not."""

from __future__ import annotations

import argparse

import pytest

from common import EMBEDDED_MODEL
from milestones.chain import short
from milestones.course import catalog
from milestones.course.student import measure
from milestones.course.student.measure import MEASUREMENTS
from milestones.course.student.measuring import TINY, Row
from tests.conftest import ROOT
from tests.course.test_prose import handout, table


def rows(milestone: str, *sizes: float) -> list[Row]:
    chosen = MEASUREMENTS[short(milestone)]
    model = TINY if chosen.model == EMBEDDED_MODEL else chosen.model
    return list(chosen.rows(milestone, model, sizes or chosen.sizes))


@pytest.mark.thorough("it measures whole tables")
@pytest.mark.parametrize("name", ["m3_paged", "m4_radix", "priority", "embedding", "hybrid_memory"])
def test_the_counters_are_those_of_the_handout(name: str) -> None:
    columns = MEASUREMENTS[short(name)].columns
    shown = table(handout(name), f"| {columns[0]} | {columns[1]} |")
    assert [tuple(row.values()) for row in shown] == rows(name)
    assert tuple(shown[0]) == columns


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
    changed = measure.Measurement(small.columns, small.rows, small.model, (32,))
    monkeypatch.setitem(MEASUREMENTS, "m4", changed)
    assert measure.main(argparse.Namespace(milestone="m4", model=None)) == 0
    assert "49%" in capsys.readouterr().out
    with pytest.raises(measure.REFUSALS, match="there is no milestone 'm9'"):
        measure.main(argparse.Namespace(milestone="m9", model=None))
