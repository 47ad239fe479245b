"""`gpu-check` on a machine without a GPU: its cases run on the CPU, and failures lose nothing."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from common import EngineConfig, load_model
from common.displays.workload import Workload
from common.hf.support import layer_shapes
from common.hf.tiny import SHAPES
from milestones.lab.bench import (
    gpu_answers,
    gpu_check,
    gpu_kernels,
    gpu_sampling,
    gpu_speed,
    gpu_tiles,
    workloads,
)
from tests.conftest import MILESTONES

TOP = MILESTONES[-1]
PAGED = next(name for name in MILESTONES if name >= "m3")
STANDARD = "random-qwen3-0.6b"


@pytest.fixture
def tiny_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the model of the standard benchmark as small as a tiny one."""
    small = {
        "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    architecture, shape = SHAPES["qwen3-0.6b"]
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", (architecture, {**shape, **small}))


def test_every_case_is_there(tmp_path: Path) -> None:
    names = list(gpu_check.all_cases("cpu", tmp_path / "page.html"))
    assert names[:1] == ["kernels"] and len(names) == len(set(names))
    assert {f"nano, {count} requests" for count in gpu_speed.RUNNING} <= set(names)
    assert {f"answers of {milestone}" for milestone in MILESTONES} <= set(names)
    engines, first = [*MILESTONES, "hf-static", "hf-batch"], names.index("lanes") + 1
    last = first + len(engines)
    assert names[first:last] == [f"workloads of {engine}" for engine in engines]
    assert {name.split()[0] for name in names[last:]} <= {"tiles", "workloads"}


def test_the_limits_of_the_cases_add_up(tmp_path: Path) -> None:
    """15 minutes, or 5 with `--quick`. Cases that must be named have limits of their own."""
    cases = gpu_check.all_cases("cuda", tmp_path / "page.html")

    def chosen(*only: str, quick: bool = False) -> dict[str, int]:
        wanted = {n: case for n, case in cases.items() if case.is_wanted(n, [*only], quick)}
        return {name: case.seconds for name, case in wanted.items()}

    assert 600 < sum(chosen().values()) <= 900 and not any("tiles" in name for name in chosen())
    quick = chosen(quick=True)
    assert sum(quick.values()) <= 300 and {"kernels", "graphs", "nano, 256 requests"} < quick.keys()
    assert {"tiles of decode, head_dim 256", "sampling"} < chosen("tiles", "samp").keys()
    assert len(chosen("tiles")) == 6 and chosen("none") == {}


@pytest.mark.parametrize("name", ["passes", "two engines", "nano, 1 requests", "lanes"])
def test_cases_run_on_a_cpu(name: str, tmp_path: Path, tiny_standard: None) -> None:
    page = tmp_path / "page.html"
    result = gpu_check.all_cases("cpu", page)[name].run()
    assert result["passed"], result
    json.dumps(result)
    assert page.exists() == (name == "lanes")


def test_a_replay_is_taken_apart(tiny_standard: None) -> None:
    result = gpu_kernels.replay_kernels(TOP, "cpu", STANDARD, rows=2)
    assert 0 < len(result["kernels"]) <= 15 and result["us"] > 0
    assert result["kernels"][0]["us"] == max(kernel["us"] for kernel in result["kernels"])


def test_graphs_are_counted(tiny_standard: None) -> None:
    result = gpu_answers.check_graphs(TOP, "cpu", STANDARD, 4)
    counts = (result["captured"], result["of"], result["replays"])
    assert counts == (0, 0, 0), "a CPU has no graphs"


CHECKOUT = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature >= 0 and ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, **options):
        import json, pathlib
        assert json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    def generate(self, prompts, params):
        return [{"token_ids": [7] * p.max_tokens} for _, p in zip(prompts, params, strict=True)]
"""


@pytest.mark.thorough("it starts another process for each engine")
@pytest.mark.parametrize(
    ("name", "files"),
    [("nano-vllm", ["nanovllm/__init__.py"]),
     ("mini-sglang", ["python/minisgl/core.py", "python/minisgl/llm.py"])],
)  # fmt: skip
def test_a_checkout_of_another_engine_is_measured(
    name: str, files: list[str], tmp_path: Path, tiny_standard: None
) -> None:
    """The engine gets the weights of ours in a folder, and the prompts of the benchmark."""
    for file in files:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_text(CHECKOUT)
    cases = gpu_check.all_cases("cpu", tmp_path / "page.html", STANDARD, tmp_path)
    assert [case for case in cases if case.startswith("nano of")] == [f"nano of {name}"]
    (row,) = cases[f"nano of {name}"].run()
    assert row["passed"] and row["tokens_per_second"] > 0 and row["workload"] == "nano", row


def test_sampling_is_measured() -> None:
    result = gpu_sampling.sampling("cpu", rows=3, vocab_size=100)
    assert set(result["us"]) == set(gpu_sampling.SAMPLERS)
    assert set(result["us"]) - set(result["in_torch_us"]) == {"greedy", "logprobs"}
    assert result["passed"] and result["different"] == 0


def test_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "DECODES", {"256 mixed": [3, 20]})
    monkeypatch.setattr(gpu_kernels, "STATIC_TOKENS", 64)
    row = gpu_kernels.decode(PAGED, "cpu", dim=16)["decode"]["256 mixed"]
    assert row["us"] > row["reduce_us"]
    assert gpu_kernels.prefill(PAGED, "cpu", tokens=20, dim=16)["flops_per_second"] > 0


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_the_fastest_tile_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that does not compile is noted, and the others are measured."""
    monkeypatch.setattr(gpu_kernels, "STATIC_TOKENS", 64)
    ops: Any = importlib.import_module(f"{PAGED}.triton_ops")
    own, tiles = getattr(ops, f"paged_{kind}"), ops.kernels.tiles(2, 16, 4, 80)

    def watched(*arguments: Any) -> Any:
        used = ops.kernels.tiles(2, 16, 4, 80)[kind]
        if used["num_stages"] == 5:
            raise RuntimeError("out of resource: shared memory")
        return own(*arguments)

    monkeypatch.setattr(ops, f"paged_{kind}", watched)
    clock = iter([9e-6, 3e-6, 6e-6])
    monkeypatch.setattr(gpu_tiles, "seconds", lambda work, _device: (work(), next(clock))[1])
    candidates: list[gpu_tiles.Tile] = [(16, 16, 4, 1), (16, 32, 4, 5), (None, 32, 2, 1)]
    result = gpu_tiles.sweep(PAGED, "cpu", kind, 16, [3, 20], candidates)
    now, first, second, third = result["tiles"].values()
    assert (now, first, third) == pytest.approx((9, 3, 6)) and "shared memory" in second
    fastest = f'"{kind}": {{"TILE": 16, "num_warps": 4, "num_stages": 1, "ROWS": 16}}'
    assert result["fastest"].startswith(f"{fastest} for head_dim 16 on ")
    assert "3.00 times" in result["fastest"] and result["fastest"] in gpu_check.line("t", result)
    assert ops.kernels.tiles(2, 16, 4, 80) == tiles


def test_fused_kernels_are_measured_beside_the_others() -> None:
    result = gpu_kernels.row_kernels("cpu", tokens=2)
    assert len(result["us"]) == 3
    assert all(kinds["fused"] > 0 < kinds["torch"] for kinds in result["us"].values())


@pytest.mark.parametrize("name", ["m1_single", TOP, "hf-static"])
def test_every_workload_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that fails is noted, and the others are measured. The line names the sampling."""

    def nano(tokens: workloads.Tokens, on_gpu: bool) -> Workload:
        return Workload([[5, 6, 7]] * 6, [3] * 6, temperature=0.6)

    def broken(tokens: workloads.Tokens, on_gpu: bool) -> Workload:
        return Workload([[]], [3])

    monkeypatch.setattr(workloads, "WORKLOADS", {"broken": broken, "nano": nano})
    monkeypatch.setattr(gpu_speed, "WORKLOADS", workloads.WORKLOADS)
    case = gpu_check.all_cases("cpu", Path("page.html"), "tiny-qwen3")[f"workloads of {name}"]
    wrong, right = case.run()
    assert not wrong["passed"] and wrong["error"]
    assert right["passed"] and right["requests"] == (6 if name == TOP else 4)
    *_, result = gpu_check.results_of([wrong, right])
    shown = gpu_check.line(name, result)
    assert "FAILED" in shown and "tokens/s (temperature 0.6)" in shown


def test_rows_are_written_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that is ended because it takes too long keeps the rows that it has measured."""
    written = list[str]()

    def rows() -> Iterator[dict[str, Any]]:
        for passed in (True, False, True):
            yield {"passed": passed}
            written.append(capsys.readouterr().out)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases = {"a": gpu_check.Case(rows, 9), "none": gpu_check.Case(list, 9)}
    monkeypatch.setattr(gpu_check, "all_cases", lambda *_, **__: cases)
    args = arguments(tmp_path)
    args.case = "a"
    assert gpu_check.main(args) == 0
    results = [gpu_check.latest_result(text) for text in written]
    assert [(len(r["rows"]), r["passed"]) for r in results] == [(1, True), (2, False), (3, False)]
    args.case = "none"
    assert gpu_check.main(args) == 0
    assert gpu_check.latest_result(capsys.readouterr().out) == {"rows": [], "passed": False}


def test_a_second_engine_with_less_memory_is_noticed(
    tiny_standard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is limited by the memory, and not by the number of requests."""
    left = [2**26, 2**25]
    pool = importlib.import_module(f"{TOP}.kv_pool")
    monkeypatch.setattr(pool, "free_memory", lambda _device: left.pop(0))
    result = gpu_answers.check_two_engines(TOP, "cpu", STANDARD)
    assert result["pages"][0] == 2 * result["pages"][1] and not result["passed"]


def test_pools_do_not_fill_a_small_gpu() -> None:
    """A large pool needs no copies: no cache holds it."""
    assert gpu_kernels.num_pools(2**20) == gpu_kernels.POOLS
    assert gpu_kernels.num_pools(2**28) == 2 and gpu_kernels.num_pools(2**30) == 1


def test_what_triton_compiles_is_counted() -> None:
    names = gpu_speed.count_compiled()
    from triton import knobs

    try:
        assert knobs.runtime.jit_cache_hook(key="k", fn=SimpleNamespace(name="a_kernel")) is False
    finally:
        knobs.runtime.jit_cache_hook = None
    assert names == ["a_kernel"]


def cases_of(names: str) -> dict[str, gpu_check.Case]:
    """Return cases that only their processes compute."""
    return {name: gpu_check.Case(list, 60) for name in names}


def test_the_total_limit_stops_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next call goes on with the cases that were not started."""
    clock = itertools.count(step=70)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(clock))
    ran = list[str]()

    def run_case(name: str, seconds: int, file: Path, peers: Path | None) -> dict[str, Any]:
        ran.append(name)
        return {"passed": True}

    monkeypatch.setattr(gpu_check, "run_case", run_case)
    args = arguments(tmp_path)
    args.minutes = 2.0
    assert gpu_check.run_all(cases_of("abc"), args, Console()) == 1 and ran == ["a"]
    assert "stopped after 2 minutes; run it again to go on" in capsys.readouterr().out
    assert gpu_check.run_all(cases_of("abc"), args, Console()) == 1 and ran == ["a", "b"]
    assert gpu_check.run_all(cases_of("abc"), args, Console()) == 0 and ran == ["a", "b", "c"]


def test_rows_of_keys_and_values_fit_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows of m2 would take 60 GB with the standard model. A card of 24 GB has fewer rows."""
    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"))
    assert gpu_speed.rows_that_fit(loaded, 256) == 256, "on a CPU"
    row = 2 * 2 * 2 * 16 * 2048 * 4  # layers, keys and values, KV heads, dim, tokens, bytes
    on_gpu = SimpleNamespace(
        name=loaded.name, resolve_max_model_len=lambda _config: 2048,
        model=SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32),
    )  # fmt: skip
    shapes = layer_shapes(loaded.model)
    monkeypatch.setattr(gpu_speed, "layer_shapes", lambda _model: shapes)
    for free, rows in ((2**40, 256), (int(100.5 * row / 0.6), 100), (0, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, free=free: (free, 2**40))
        assert gpu_speed.rows_that_fit(on_gpu, 256) == rows  # type: ignore[arg-type]


@pytest.mark.parametrize("is_peer", [True, False])
def test_a_peer_that_does_not_fit_is_skipped(
    is_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A milestone that does not fit has failed: its sizes follow the card."""

    def measure(work: Workload) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    loaded = load_model(EngineConfig(model="tiny-llama", device="cpu"))
    rows = [*gpu_speed.rows_of(measure, loaded, "cpu", is_peer=is_peer)]
    assert {row["passed"] for row in rows} == {is_peer}
    assert all("does not fit" in row["skipped"] for row in rows)


def arguments(tmp_path: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu_check.add_arguments(parser)
    return parser.parse_args(["--json", str(tmp_path / "r.json")])


def test_a_failed_case_loses_nothing_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, answers = list[str](), {"b": subprocess.CompletedProcess("", 1, "", "a\nCUDA error: 700")}

    def process(command: list[str], **_: Any) -> Any:
        name = command[command.index("--case") + 1]
        ran.append(name)
        if name == "c":
            saved = json.loads((tmp_path / "r.json").read_text())["cases"]
            assert list(saved) == ["a", "b"], "the file is written after each case"
            rows = b'{"rows": [{"passed": true}], "passed": true}'
            half = gpu_check.MARK.encode() + rows[:9]
            raise subprocess.TimeoutExpired(
                command, 1, b"x\n" + gpu_check.MARK.encode() + rows + b"\n" + half
            )
        good = subprocess.CompletedProcess(
            "", 0, gpu_check.MARK + '{"passed": true, "us": 2.5}\n', ""
        )
        return answers.get(name, good)

    monkeypatch.setattr(subprocess, "run", process)
    args, console = arguments(tmp_path), Console()
    assert gpu_check.run_all(cases_of("abcd"), args, console) == 1
    shown = capsys.readouterr().out
    assert "passed  a: us 2.5" in shown and "FAILED  b: CUDA error: 700" in shown
    assert "FAILED  c: it took longer" in shown and ran == ["a", "b", "c", "d"]
    stopped = json.loads((tmp_path / "r.json").read_text())["cases"]["c"]
    assert stopped["rows"] == [{"passed": True}] and not stopped["passed"]
    answers.clear()
    ran.clear()
    assert gpu_check.run_all(cases_of("abd"), args, console) == 0 and ran == ["b"]
    args.json.unlink()
    assert gpu_check.run_all(cases_of("a"), args, console) == 0
    assert ran == ["b", "a"]
