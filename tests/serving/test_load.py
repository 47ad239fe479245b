"""`python -m milestones load`: arrivals, percentiles, and a run against a server."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.displays.workload import percentile
from milestones.chain import electives
from milestones.drawing.chart import lines
from milestones.serving.load import command
from milestones.serving.load.arrivals import Arrival, Workload, length_range
from tests.helpers.serving import Serve

LENGTHS = ((3, 5), (2, 4))  # of prompts and of outputs


def test_arrivals_are_a_poisson_process() -> None:
    """Equal seeds give equal requests; mean and variance of the gaps are those of the rate."""
    workload = Workload(*LENGTHS, [1, 2, 3])
    arrivals = list(workload.arrivals(50.0, 100.0, seed=4))
    assert arrivals == list(workload.arrivals(50.0, 100.0, seed=4))
    times = [arrival.time for arrival in arrivals]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert variance == pytest.approx(1 / 50**2, rel=0.2)
    assert all(3 <= len(a.prompt) <= 5 and 2 <= a.max_tokens <= 4 for a in arrivals)


def test_prefixes_are_shared() -> None:
    workload = Workload(*LENGTHS, range(100), num_prefixes=2, prefix_tokens=8)
    arrivals = list(workload.arrivals(20.0, 10.0, seed=0))
    assert len({tuple(arrival.prompt[:8]) for arrival in arrivals}) == 2
    assert len({tuple(arrival.prompt) for arrival in arrivals}) == len(arrivals)


def test_lengths_are_read() -> None:
    assert length_range("7") == (7, 7) and length_range("7-9") == (7, 9)
    for text in ("0", "9-7", "x", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            length_range(text)


@pytest.mark.extra("serve")
def test_the_summary_leaves_the_warm_up_out() -> None:
    from milestones.serving.load.client import Answer
    from milestones.serving.load.report import Limits, summary

    usage = {"completion_tokens": 3}

    def answer(time: float, first: float | None, total: float, error: str | None = None) -> Answer:
        return Answer(Arrival(time, [1], 3), 0.0, first, [0.1, 0.3], total, usage, error)

    answers = [
        answer(1.0, 9.0, 9.0), answer(2.0, 0.5, 0.7), answer(3.0, 0.5, 1.7),
        answer(4.0, 1.5, 1.7), answer(5.0, None, 0.0, "status 429"),
    ]  # fmt: skip
    row = summary(1.0, 10.0, answers, warm_up=2.0, limits=Limits(first=1.0, per_token=0.2))
    assert (row.num_requests, row.num_failed, row.errors) == (4, 1, {"status 429": 1})
    assert row.goodput == pytest.approx(0.1)  # the second one only
    assert row.first_ms == pytest.approx({50: 500.0, 95: 1500.0, 99: 1500.0})
    assert [percentile([*range(1, 101)], point) for point in (1, 50, 99)] == [1, 50, 99]
    assert percentile([7.0], 99) == 7.0


@pytest.mark.extra("serve")
@pytest.mark.since("m5_overlap")
def test_a_run_against_a_server(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = serve()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    path = tmp_path / "load.json"
    drawing = tmp_path / "load.svg"
    options = ["--rates", "20,40", "--duration", "0.5", "--warm-up", "0.1", "--prompt-tokens",
               "4-8", "--output-tokens", "3", "--prefixes", "2", "--prefix-tokens", "32",
               "--ttft", "60", "--itl", "60", "--json", str(path),
               "--svg", str(drawing)]  # fmt: skip
    assert command.main(parser.parse_args([run.url, *options])) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["rate"] for row in rows] == [20.0, 40.0]
    for row in rows:
        assert row["num_failed"] == 0 and row["goodput"] == row["num_requests"] / 0.5 > 0
    drawn = ElementTree.parse(drawing).getroot()
    curves = [
        item.get("d") or "" for item in drawn.iter() if item.get("class") == "curve forward-line"
    ]
    assert len(curves) == 3 and all(curve.count("L") == len(rows) - 1 for curve in curves)
    assert "goodput" in capsys.readouterr().out
    stats = run.in_engine(lambda engine: engine.stats())
    assert stats.cached_prompt_tokens > 0
    assert command.main(parser.parse_args(["http://127.0.0.1:9/v1", "--duration", "0.1"])) == 1


@pytest.mark.thorough("it starts servers in processes")
@pytest.mark.extra("serve")
@pytest.mark.since("m5_overlap")
@pytest.mark.before(*electives())
def test_a_run_against_engines(
    milestone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that does not keep the limits gets no higher rate. Its process ends."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    path, drawing = tmp_path / "load.json", tmp_path / "load.svg"
    options = ["--engines", milestone, "--serve-options", "--model tiny-llama --max-num-seqs 4",
               "--rates", "10,20", "--duration", "0.5", "--warm-up", "0", "--prompt-tokens", "4",
               "--output-tokens", "3", "--json", str(path), "--svg", str(drawing)]  # fmt: skip
    assert command.main(parser.parse_args([*options, "--ttft", "60", "--itl", "60"])) == 0
    assert [row["rate"] for row in json.loads(path.read_text())["engines"][milestone]] == [10, 20]
    assert command.main(parser.parse_args([*options, "--ttft", "0"])) == 0
    assert [row["rate"] for row in json.loads(path.read_text())["engines"][milestone]] == [10]
    wrong = ["--engines", milestone, "--serve-options", "--model no-such-model"]
    capsys.readouterr()
    assert command.main(parser.parse_args(wrong)) == 1
    assert "no-such-model" in capsys.readouterr().out
    assert command.main(parser.parse_args([])) == 2
    assert command.main(parser.parse_args(["http://127.0.0.1:9/v1", *options])) == 2


def test_a_chart_has_a_curve_for_each_name() -> None:
    """Values that differ by more than a factor of thirty get a logarithmic axis."""
    panels = {
        "small": {"m1": [(1, 2.0), (2, 4.0)], "m2": [(1, 1.0), (4, 3.0)]},
        "wide": {"m2": [(1, 1.0), (2, 10.0), (4, 1000.0)]},
    }
    drawn = ElementTree.fromstring(lines(panels, "title"))
    curves = [item for item in drawn.iter() if "curve" in (item.get("class") or "")]
    kinds = [curve.get("class") for curve in curves]
    assert kinds == ["curve hot-line", "curve prompt-line", "curve prompt-line"]
    heights = [float(place.split()[1]) for place in (curves[2].get("d") or "")[1:].split(" L")]
    assert heights[0] - heights[1] == pytest.approx((heights[1] - heights[2]) / 2, abs=0.2)
    words = [item.text for item in drawn.iter() if item.tag.endswith("text")]
    assert {"m1", "m2", "small", "wide", "1,000"} <= {*words}
