"""The bench: its workloads, its engines, and the tables and figures of their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import EMBEDDED_MODEL
from common.displays.demo import machine
from common.displays.workload import Driver, Workload, WorkloadResult, run
from milestones.lab.bench import command as bench
from milestones.lab.bench import curves, engines, report, workloads
from milestones.lab.bench.engines import BenchEngine, PipedEngine, Summary
from milestones.lab.bench.neighbours import neighbours
from milestones.lab.bench.peers import with_llama, with_onnx, with_openvino, with_vllm
from milestones.lab.bench.peers.serve import serve_in_steps
from milestones.lab.bench.roofline import Roofline
from tests.conftest import MILESTONES, ROOT, EngineFactory

MARKS = ("<!-- ladder -->", "<!-- /ladder -->")  # around the results in a page
RESULT = WorkloadResult([[1, 2]], 0.5, [0.1, 0.3], {}, kv_reserved=10, kv_used=4)


def run_bench(*arguments: object) -> int:
    """Run `python -m milestones bench` with these arguments. Return its exit status."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args([str(argument) for argument in arguments]))


class Quick(BenchEngine):
    """An engine that has its result at once, or an error in its run number `fails_at`."""

    def __init__(self, name: str, fails_at: int = 0, error: BaseException | None = None) -> None:
        super().__init__(name)
        self.num_runs, self.fails_at, self.error = 0, fails_at, error

    def run(self, workload: Workload) -> WorkloadResult:
        self.num_runs += 1
        if self.error is not None and self.num_runs == self.fails_at:
            raise self.error
        return RESULT


@pytest.fixture
def no_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench measures this machine for seconds. Tests of anything else do not wait for it."""
    floor = Roofline(1e10, 1e11, 10**9, 250 * 10**6, 10**6)
    monkeypatch.setattr("milestones.lab.bench.roofline.measure", lambda model: floor)


def test_all_engines_are_there() -> None:
    pythons = dict.fromkeys(("vllm", "llama", "openvino", "onnx"), Path("p"))
    names = [engine.name for engine in engines.all_engines("any", **pythons)]
    others = ["hf-static", "hf-batch", "vllm", "onnx", "llama", "llama-stored"]
    assert names == [*MILESTONES, *others, "openvino", "openvino-float32"]


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_workloads_are_the_same_every_time_and_fit(name: str) -> None:
    work = workloads.workload(name, "tiny-llama", 259)
    assert work == workloads.workload(name, "tiny-llama", 259)
    assert len(work.max_tokens) == len(work.prompts) == len(work.arrivals or work.prompts)
    assert max(max(prompt) for prompt in work.prompts) < 259
    assert workloads.WORKLOADS[name].__doc__, f"the workload {name} has no docstring"


def test_the_standard_benchmark_is_the_standard_one() -> None:
    work = workloads.workload("nano", "any", 150_000, on_gpu=True)
    assert sum(map(len, work.prompts)) == 142_827 and sum(work.max_tokens) == 133_966


def test_every_engine_samples_as_the_workload_says() -> None:
    on_gpu = workloads.workload("nano", "tiny-llama", 50_000, on_gpu=True)
    assert (on_gpu.sampling, on_gpu.warm_up().sampling) == ("temperature 0.6",) * 2
    assert workloads.workload("nano", "tiny-llama", 50_000).sampling == "greedy"
    assert workloads.workload("alone", "any", 300).config["quantization"] == "auto"
    in_float32 = workloads.workload("alone", "any", 300, quantization="none")
    assert in_float32.config["quantization"] == "none"
    assert engines.sampling(0.0) == {"do_sample": False}
    assert engines.sampling(0.6)["top_k"] == 0, "Hugging Face keeps 50 tokens by default"
    assert Driver(on_gpu).temperature == 0.6


def test_a_user_speaks_when_it_is_due_and_answers_what_it_got(make_engine: EngineFactory) -> None:
    engine = make_engine()
    work = Workload([[1, 2, 3], [4, 5]], [3, 2], True, {}, [0.0, 0.2], [[[6], [7, 8]], []])
    result = run(engine, work)
    assert [len(tokens) for tokens in result.token_ids] == [3, 3, 3, 2]
    first, second = result.token_ids[:2]
    again = run(engine, Workload([[1, 2, 3, *first, 6, *second, 7, 8]], [3], True))
    assert again.token_ids[0] == result.token_ids[2], "turn 3 does not begin with turns 1 and 2"
    assert result.seconds >= 0.2 and min(result.first_token_seconds) > 0
    assert len(result.gap_seconds) > 0 and all(gap >= 0 for gap in result.gap_seconds)


def test_a_request_that_fails_ends_the_measurement(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("no text")

    monkeypatch.setattr("common.text.output_text.OutputText.append", fail)
    with pytest.raises(RuntimeError, match="no text"):
        run(make_engine(), Workload([[1, 2, 3], [4, 5]], [3, 2], True))


def test_tokens_of_one_output_count_one_by_one() -> None:
    driver = Driver(Workload([[1]], [4]))
    engine: Any = SimpleNamespace(add_request=lambda *_: "a")
    driver.add_due(engine, 0.0)

    def output(tokens: list[int], finished: bool) -> Any:
        completion = SimpleNamespace(error=None, token_ids=tokens)
        metrics = SimpleNamespace(num_cached_tokens=0)
        return SimpleNamespace(
            request_id="a", outputs=[completion], finished=finished, metrics=metrics
        )

    driver.take(output([1], False), 1.0)
    driver.take(output([1, 2, 3], True), 2.0)
    assert driver.turns[0][0].token_seconds == [1.0, 2.0, 2.0] and driver.done


@pytest.mark.thorough("it measures three engines in processes")
def test_bench_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The highest milestone and both Hugging Face loops, each in a process of its own."""
    file, picture = tmp_path / "bench.json", tmp_path / "bench.svg"
    names = [MILESTONES[-1], "hf-static", "hf-batch"]

    def small(*_: Any) -> Workload:
        config = {"model": "tiny-llama", "max_num_seqs": 2}
        turns = [[[4]], [[5]]]
        return Workload([[1, 2], [3]], [3, 3], True, config, follow_ups=turns, temperature=0.6)

    monkeypatch.setattr(bench, "workload", small)
    arguments = ["--model", "tiny-llama", "--engines", ",".join(names), "--rounds", 1]
    assert run_bench(*arguments, "--workload", "turns", "--json", file, "--svg", picture) == 0
    measured, shown = json.loads(file.read_text()), capsys.readouterr().out
    assert list(measured["engines"]) == names and measured["machine"]
    same = {"quantization": "auto", "beside": 0}
    assert report.earlier(file, same) == measured
    assert report.earlier(file, same | {"beside": 1}) == {}
    assert measured["roofline"]["bytes_per_second"] > 0
    assert measured["engines"][names[0]]["turns"]["stats"]["decode_tokens"] == 4 * 2
    assert all(measured["engines"][name]["turns"]["tokens_per_second"] > 0 for name in names)
    assert all(name in shown for name in names) and "\x1b" not in shown
    assert "Every engine: temperature 0.6" in " ".join(shown.split())
    assert {measured["engines"][name]["turns"]["sampling"] for name in names} == {"temperature 0.6"}
    kinds = [bar.get("class") for bar in ET.parse(picture).findall(".//{*}rect")]
    assert (kinds.count("forward"), kinds.count("soft")) == (1, 2)


@pytest.mark.usefixtures("no_roofline")
def test_an_elective_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine of the tree runs by the name of its package. An elective only if it is named."""
    commands: list[tuple[str, ...]] = []

    def run(self: BenchEngine, _: Workload) -> WorkloadResult:
        commands.append(self.command)
        return RESULT

    monkeypatch.setattr(BenchEngine, "run", run)
    options = ("--model", "tiny-llama", "--workload", "alone", "--rounds", 1)
    assert run_bench(*options, "--engines", "m5_overlap,multi_step") == 0
    assert [module for _, module in commands] == ["m5_overlap", "milestones.electives.multi_step"]
    assert "multi_step" in capsys.readouterr().out


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench("--engines", "m9_magic") == 2
    assert "m9_magic" in capsys.readouterr().out


@pytest.mark.usefixtures("no_roofline")
def test_what_is_cut_short_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    interrupted = Quick("b", 2, KeyboardInterrupt())
    monkeypatch.setattr(bench, "all_engines", lambda *_, **__: [Quick("a"), interrupted])
    assert run_bench("--model", "tiny-llama", "--json", file) == 0
    engines = json.loads(file.read_text())["engines"]
    assert set(engines["a"]) == {"alone", "batch"} and set(engines["b"]) == {"alone"}
    assert "interrupted: " in capsys.readouterr().out


@pytest.mark.usefixtures("no_roofline")
def test_an_engine_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "bench.json", Quick("b")
    broken = Quick("a", 2, ValueError("a reads other models"))
    gone = PipedEngine("llama", tmp_path / "no such python", lambda: "anywhere", forgets=False)
    monkeypatch.setattr(bench, "all_engines", lambda *_, **__: [broken, gone, whole])
    assert run_bench("--model", "tiny-llama", "--json", file, "--rounds", 2) == 1
    engines, shown = json.loads(file.read_text())["engines"], capsys.readouterr().out
    assert set(engines["a"]) == {"alone"} and set(engines["b"]) == {"alone", "batch"}
    assert whole.num_runs == 4 and "a reads other models" in shown and "no such python" in shown


@pytest.mark.usefixtures("no_roofline")
def test_another_workload_stands_beside_what_was_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.json"

    def measure(*names: str, workload: str) -> Any:
        monkeypatch.setattr(bench, "all_engines", lambda *_, **__: [Quick(name) for name in names])
        arguments = ["--model", "tiny-llama", "--rounds", 1, "--workload", workload]
        assert run_bench(*arguments, "--json", file) == 0
        document = json.loads(file.read_text())
        return {name: set(found) for name, found in document["engines"].items()}

    assert measure("a", "b", workload="alone") == {"a": {"alone"}, "b": {"alone"}}
    assert measure("a", workload="turns") == {"a": {"alone", "turns"}, "b": {"alone"}}
    # All results of a workload are from one run, so the older result of `b` is dropped.
    assert measure("a", workload="alone") == {"a": {"turns", "alone"}}
    document = json.loads(file.read_text()) | {"machine": "another one"}
    file.write_text(json.dumps(document))
    assert measure("b", workload="alone") == {"b": {"alone"}}, "results of another machine stay"


def test_cpus_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All machines of a cloud may be called "AMD EPYC", although some are twice as fast."""
    kinds = set()
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=capability: kind)
        kinds.add(machine())
    assert len(kinds) == 2


def test_a_summary_is_the_median_round() -> None:
    rounds = [WorkloadResult([[1, 2]], s, [s / 10, s], {}) for s in (0.5, 2.0, 1.0)]
    summary = Summary.of(rounds)
    assert summary.tokens_per_second == 2.0 and summary.first_token == (0.1, 1.0)
    assert summary.inter_token is None and summary.gap is None


def test_the_share_of_the_floor_is_a_median_as_the_speed_is() -> None:
    """A machine that is busy in the last round slows both columns down, or neither."""
    engine = BenchEngine("m4_radix")
    stats = {"num_steps": 1, "decode_tokens": 1, "prefill_tokens": 0}
    seconds = (0.2, 0.25, 9.0)
    engine.results["alone"] = [WorkloadResult([[1]], s, [s], stats) for s in seconds]
    floor = Roofline(1e10, 1e11, 10**9, 250 * 10**6, 10**6)
    table = report.table("alone", [engine], floor, "greedy")
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["tokens/s"] == ["4.0"]
    assert cells["of floor"] == ["40%"], "0.1 s of the median round's 0.25 s"


def test_the_floor_of_a_run() -> None:
    """A machine of 10 GB/s and 100 GFLOP/s; 1e9 bytes of float32 weights; 1 MB of KV per token."""
    floor = Roofline(1e10, 1e11, 10**9, 250 * 10**6, 10**6)
    assert floor.step_seconds(1) == pytest.approx(0.1), "reading the weights takes 0.1 s"
    assert floor.step_seconds(100) == pytest.approx(0.5), "the arithmetic takes 0.5 s"
    result = WorkloadResult([[]], 9.0, [], {}, kv_used=1000)
    result.stats = {"num_steps": 10, "decode_tokens": 20, "prefill_tokens": 200}
    assert floor.seconds(result) == pytest.approx(1.0 + 10 * 0.1 + 0.1)


def test_other_programs_run_beside_an_engine_and_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(KeyboardInterrupt), neighbours(2):
        assert [program.poll() for program in started] == [None, None]
        assert all(os.getsid(program.pid) == program.pid for program in started)
        raise KeyboardInterrupt
    assert all(program.poll() is not None for program in started)


def test_the_floor_of_a_prefill() -> None:
    """50e6 of the 250e6 weights are the head's, which a prefill needs for one token only."""
    floor = Roofline(1e10, 1e11, 10**9, 250 * 10**6, 10**6, 50 * 10**6, query_width=10**6)
    assert floor.prefill_seconds(100) == pytest.approx(0.4 + 0.2)
    result = WorkloadResult([[]], 9.0, [], {})
    result.stats = {"num_steps": 1, "decode_tokens": 0, "prefill_tokens": 100}
    assert floor.seconds(result) == pytest.approx(0.4 + 0.1), "and the weights are read once more"


def test_a_piped_engine_answers_line_by_line(tmp_path: Path) -> None:
    """A program with the protocol of `serve.py` stands in for it. If it ends, that is an error.

    The fake's tokens say how many workloads its process got before. An engine that forgets keeps
    its process: two warm-ups and a workload come before the second one. Otherwise each workload has
    a new process, and only its warm-up comes before.
    """
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\nimport json, sys\nfor before, line in enumerate(sys.stdin):\n"
        "    w = json.loads(line)\n"
        "    tokens = [[before] * n for n in w['max_tokens']]\n"
        "    answer = {'token_ids': tokens, 'seconds': 1.0, 'first_token_seconds': [0.1]}\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    fake.chmod(0o755)
    for forgets, second in ((True, 3), (False, 1)):
        engine = PipedEngine("vllm", fake, lambda: "anywhere", forgets=forgets)
        assert engine.run(Workload([[1]], [4])).token_ids == [[1] * 4]
        assert engine.run(Workload([[1]], [4])).token_ids == [[second] * 4]
        engine.close()
    gone = PipedEngine("llama", Path("/bin/true"), lambda: "anywhere", forgets=False)
    with pytest.raises(RuntimeError, match=r"llama ended; to see why: /bin/true .*serve.py llama"):
        gone.run(Workload([[1]], [4]))


def test_llama_cpp_reads_gguf_files() -> None:
    assert str(engines.gguf_file("some.gguf")) == "some.gguf"
    assert str(engines.gguf_file(EMBEDDED_MODEL)).endswith(".gguf")
    with pytest.raises(ValueError, match="not 'tiny-llama'"):
        engines.gguf_file("tiny-llama")


class FakeLlama:
    """The part of llama.cpp's server that `with_llama.py` uses: one token per chunk, then an end.

    Like the real server, it sends no chunk for a token that ends inside a character. Here this is
    every second token.
    """

    def handle_completions(self, request: dict[str, Any], take: Any) -> None:
        if not request["prompt"]:
            take({"error": {"message": "an empty prompt"}})
            return
        count = request["n_predict"]
        for number in range(1, count + 1, 2):
            told = {"tokens": [len(request["prompt"])], "tokens_predicted": number, "stop": False}
            take({"choices": [], "__verbose": told})
        take({"choices": [], "__verbose": {"tokens": [], "tokens_predicted": count, "stop": True}})


def test_what_llama_cpp_tells_is_counted() -> None:
    work = Workload([[1, 2, 3], [4]], [4, 3], True, {}, [], [[[9]], []])
    result = WorkloadResult(**with_llama.serve_with_llama(FakeLlama(), asdict(work)))
    assert result.token_ids == [[3, 0, 3, 0], [8, 0, 8, 0], [1, 0, 1]], "turn 2 follows turn 1"
    assert len(result.first_token_seconds) == 3 and len(result.inter_token_seconds) == 3 + 3 + 2
    with pytest.raises(RuntimeError, match="an empty prompt"):
        with_llama.serve_with_llama(FakeLlama(), asdict(Workload([[]], [1])))


class FakeVllm:
    """The part of vLLM's engine that `with_vllm.py` uses: one token for each request in a step."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, int, list[int]]] = {}

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.ignore_eos and params.temperature == 0.0
        self.running[name] = (len(prompt["prompt_token_ids"]), params.max_tokens, [])

    def step(self) -> list[Any]:
        outputs = []
        for name, (length, most, tokens) in list(self.running.items()):
            tokens.append(length)
            if len(tokens) == most:
                del self.running[name]
            given = [SimpleNamespace(token_ids=list(tokens))]
            finished = len(tokens) == most
            outputs.append(SimpleNamespace(request_id=name, outputs=given, finished=finished))
        return outputs


def test_what_vllm_tells_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    work = Workload([[1, 2, 3], [4]], [4, 3], True, {}, [0.0, 0.02], [[[9]], []])
    result = WorkloadResult(**serve_in_steps(with_vllm.Engine(FakeVllm()), asdict(work)))
    assert sorted(result.token_ids) == [[1] * 3, [3] * 4, [8] * 4], "turn 2 follows turn 1"
    assert len(result.first_token_seconds) == 3 and len(result.inter_token_seconds) == 3 + 3 + 2
    assert result.seconds >= 0.02, "the second user comes later"


class FakePipeline:
    """The part of OpenVINO GenAI that `with_openvino.py` uses: one token for each request."""

    def __init__(self) -> None:
        self.running: list[Any] = []

    def add_request(self, number: int, ids: Any, config: Any) -> Any:
        assert config.ignore_eos and not config.do_sample
        [prompt] = ids.tolist()
        handle = SimpleNamespace(new=[], left=config.max_new_tokens, token=len(prompt))
        handle.can_read = lambda: bool(handle.new)
        handle.read = lambda: {0: SimpleNamespace(generated_ids=[handle.new.pop()])}
        self.running.append(handle)
        return handle

    def step(self) -> None:
        for handle in self.running:
            handle.new.append(handle.token)
            handle.left -= 1
        self.running = [handle for handle in self.running if handle.left]


def test_what_openvino_tells_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(GenerationConfig=SimpleNamespace, Tensor=lambda array: array)
    for name in ("openvino", "openvino_genai"):
        monkeypatch.setitem(sys.modules, name, given)
    work = Workload([[1, 2, 3], [4]], [4, 3], True, {}, [], [[[9]], []])
    served = serve_in_steps(with_openvino.Engine(FakePipeline()), asdict(work))
    assert sorted(served["token_ids"]) == [[1] * 3, [3] * 4, [8] * 4], "turn 2 follows turn 1"


def test_what_onnx_runtime_tells_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other. A second turn begins with the answer of the first one."""
    asked: list[list[int]] = []

    def generate(_model: Any, prompt: list[int], most: int, _: Any) -> list[int]:
        asked.append(prompt)
        return [len(prompt)] * most

    monkeypatch.setattr(with_onnx, "generate", generate)
    work = {
        "prompts": [[1], [2, 2]],
        "max_tokens": [2, 1],
        "arrivals": [],
        "follow_ups": [[[7]], []],
    }
    served = with_onnx.serve_one_by_one(None, work)
    assert asked == [[1], [1, 1, 1, 7], [2, 2]]
    assert served["token_ids"] == [[1, 1], [4, 4], [2]]
    assert len(served["first_token_seconds"]) == 3 and len(served["inter_token_seconds"]) == 2


def test_bench_refreshes_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, end = MARKS
    (tmp_path / "milestones" / "docs").mkdir(parents=True)
    files = [tmp_path / name for name in ("README.md", "milestones/docs/SPEED.md")]
    for page in files:
        page.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    speed = {"tokens_per_second": 4.0}
    engines = {name: {"batch": speed, "turns": speed} for name in ("m1_single", "m2_continuous")}
    document = {"machine": "any", "engines": engines}
    report.refresh_pages(document)
    few, everything = (page.read_text() for page in files)
    for text in (few, everything):
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| m1_single | 4.0 |\n" in few and "m2_continuous" not in few
    assert all(f"| {name} | 4.0 | 4.0 |\n" in everything for name in engines)
    assert "- `turns`: " in everything and "first token" not in everything


def test_times_to_first_tokens_have_a_table_of_their_own() -> None:
    floor = Roofline(1e10, 1e11, 10**9, 250 * 10**6, 10**6)
    entry = {"tokens_per_second": 0.1, "first_token": [10.24, 10.24]}
    engines = {"m4_radix": {"prompt_2048": entry}, "vllm": {"alone": {"tokens_per_second": 1.0}}}
    lines = report.prefill_lines({"roofline": asdict(floor), "engines": engines})
    assert lines[-1] == "| m4_radix | - | 10240 (100%) |", "vLLM was not measured on prompts alone"
    assert report.prefill_lines({"roofline": asdict(floor), "engines": {"vllm": {}}}) == []


@pytest.mark.parametrize(
    ("page", "names"),
    [("README.md", report.README_ENGINES), ("milestones/docs/SPEED.md", MILESTONES)],
)
def test_a_page_of_results_has_its_engines(page: str, names: Sequence[str]) -> None:
    start, end = MARKS
    table = (ROOT / page).read_text(encoding="utf-8").split(start)[1].split(end)[0]
    assert all(f"| {name} |" in table for name in names)


def test_curves_are_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RUNNING", "CONTEXTS", "CACHED"):
        monkeypatch.setattr(curves, name, (4, 8))
    file, picture = tmp_path / "curves.json", tmp_path / "curves.svg"
    parser = argparse.ArgumentParser()
    curves.add_arguments(parser)
    arguments = ["--model", "tiny-llama", "--json", str(file), "--svg", str(picture)]
    assert curves.main(parser.parse_args(arguments)) == 0
    measured, shown = json.loads(file.read_text())["milliseconds"], capsys.readouterr().out
    for name in ("running", "context", "cached"):
        assert [size for size, _ in measured[name]] == [4, 8]
        assert all(milliseconds > 0 for _, milliseconds in measured[name])
        assert name in shown
    assert len(ET.parse(picture).findall(".//{*}path[@class='curve forward-line']")) == 3
