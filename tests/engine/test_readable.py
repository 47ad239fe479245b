"""The reading mode: Python runs each line of a milestone's files, in every step."""

from __future__ import annotations

import ast
import copy
import gc
import io
import json
import os
import sys
import threading
from bdb import BdbQuit
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from common import EngineConfig, load_model
from common.displays.workload import Workload
from common.displays.workload_process import serve
from common.fast.passes import PASSES, apply_passes, has_passes
from common.fast.stored.modules import keep_narrow, with_stored
from milestones.chain import load, sources
from tests.conftest import ROOT, EngineFactory, ModuleOf, build_engine, plain_model
from tests.helpers.oracle import assert_one_answer, drain, greedy

MODEL = "tiny-llama"
PROMPTS = ([7], [1, 2, 3], list(range(40, 62)), list(range(9)))
FILES = ("attention.py", "model_input.py", "model_runner.py")
# Functions of these files that do not run in the test, and why.
EXCEPTIONS = {
    "ModelRunner.synchronize": "only after a failed forward",
    "PrefillRunner.end_sends": "only after a failed send",
    "PrefillRunner.mark_sends": "only if an attempt is stopped",
    "InputBuilder.lora_rows": "only with adapters",
    "InputBuilder.positions": "only with images",
    "InputBuilder._places_of_outputs": "only with penalties",
    "ModelRunner.copy_pages.work": "only if a page goes to host memory or back",
    "ModelRunner.end_copies": "only if a page goes to host memory or back",
    "ModelRunner.sample": "only with a grammar",
    "ModelRunner.launch.compute": "only with a grammar",
    "ModelRunner.launch.choose": "only with a grammar",
    "ModelInput.tensors": "only with graphs",
    "ModelRunner.inputs_to_capture": "only with graphs",
    "ModelRunner._hybrid_ops": "only for a model with windows, soft caps or sinks",
}
Line = tuple[str, int]  # a file, and the first line of a function


class Calls:
    """Counts the calls of functions, in all threads."""

    def __init__(self) -> None:
        self.counts: Counter[Line] = Counter()
        self.threads: dict[Line, set[str]] = {}  # by name

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            line = frame.f_code.co_filename, frame.f_code.co_firstlineno
            self.counts[line] += 1
            self.threads.setdefault(line, set()).add(threading.current_thread().name)

    def clear(self) -> None:
        self.counts.clear()
        self.threads.clear()


def line_of(function: Any) -> Line:
    code = function.__code__
    return code.co_filename, code.co_firstlineno


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count calls in this thread, and in threads that start inside this context."""
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def functions_of(path: Path) -> dict[str, Line]:
    """Return the functions and methods of a file by name, with their first lines."""
    found: dict[str, Line] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[inside[:-1]] = str(path), first
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


@pytest.mark.electives
def test_each_step_runs_the_lines_of_the_engine(
    milestone: str, make_engine: EngineFactory, module_of: ModuleOf
) -> None:
    """Each function of the files runs, and `paged_attention` in each layer of each forward."""
    files = sources(milestone, ROOT)
    with counted_calls() as calls:
        engine = make_engine(
            plain_model(MODEL), readable=True,
            page_size=4, max_num_batched_tokens=24, max_num_seqs=3,
        )  # fmt: skip
        loading = {*calls.counts}
        calls.clear()
        outputs = engine.generate(PROMPTS, greedy(8))
        engine.check_invariants()
        engine.close()
    for output in outputs:
        assert_one_answer(MODEL, output, 8)
    ran = loading | {*calls.counts}
    functions = [item for f in FILES if f in files for item in functions_of(files[f]).items()]
    assert {name for name, line in functions if line not in ran} <= EXCEPTIONS.keys()
    if "attention.py" in files:
        forwards = calls.counts[line_of(module_of("model_runner").ModelRunner.forward)]
        assert forwards == engine.stats().num_steps
        entered = line_of(module_of("attention").paged_attention)
        layers = engine.loaded.model.config.num_hidden_layers
        assert calls.counts[entered] == layers * forwards
        worker = "forward" if "stream.py" in files else "MainThread"
        assert calls.threads[entered] == {worker}


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.since("m3_paged")
@pytest.mark.before("kv_quant")  # it runs those of `packed_kernels.py`
@pytest.mark.only_of("kernels.py", "triton_ops.py")
def test_triton_kernels_run_line_by_line(milestone: str, make_engine: EngineFactory) -> None:
    """The interpreter runs each kernel as Python of `kernels.py`, with its lines."""
    engine = make_engine(plain_model(MODEL), readable=True, attention_backend="triton")
    with counted_calls() as calls:
        # The context is long enough to be split.
        (output,) = engine.generate([[1, 2, 3] * 22], greedy(2))
    assert_one_answer(MODEL, output, 2)
    path = sources(milestone, ROOT)["kernels.py"]
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    # The interpreter leaves the decorator out, so its code begins with `def`.
    assert [f.name for f in functions if (str(path), f.lineno) not in calls.counts] == []


def test_triton_gets_its_variable_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert EngineConfig(readable=True).attention_backend == "torch"
    assert os.environ["TRITON_INTERPRET"] == "0"
    assert EngineConfig(readable=True, attention_backend="triton").attention_backend == "triton"
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_triton_without_its_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.language, "cdiv", triton.JITFunction(triton.language.cdiv.fn))
    with pytest.raises(ValueError, match="attention_backend.*set TRITON_INTERPRET=1"):
        EngineConfig(readable=True, attention_backend="triton")
    EngineConfig(attention_backend="triton")


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention_backend", "compiled"), ("model_passes", "merge"), ("readable", 2)],
)
def test_other_fields_must_agree(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        EngineConfig(**{"readable": True, field: value})  # type: ignore[arg-type]


def test_a_model_is_loaded_as_hugging_face_has_it() -> None:
    config = EngineConfig(model=MODEL, device="cpu", readable=True)
    assert EngineConfig(**vars(config)) == config, "a process gets the configuration as it is"
    model = load_model(config).model
    assert not has_passes(model)
    assert next(with_stored(model), None) is None


@pytest.mark.parametrize("names", ["none", *PASSES, "all"])
def test_each_pass_is_found(names: str) -> None:
    model = copy.deepcopy(plain_model(MODEL).model)
    changed = apply_passes(model, names)
    found = has_passes(model) or next(with_stored(model), None) is not None
    assert found == any(changed.values())


def test_a_model_with_passes_or_stored_weights_is_refused(milestone: str) -> None:
    """Such a model would leave lines of the model out, so the engine refuses it."""
    plain = plain_model(MODEL)
    changed = replace(plain, model=copy.deepcopy(plain.model))
    apply_passes(changed.model, "norm")
    with pytest.raises(ValueError, match="loaded must be .* tiny-llama has passes"):
        build_engine(milestone, changed, readable=True)
    stored = replace(plain, model=copy.deepcopy(plain.model).bfloat16())
    assert keep_narrow(stored.model, 8) > 0
    with pytest.raises(ValueError, match="loaded must be .* tiny-llama has stored weights"):
        build_engine(milestone, stored, readable=True)


@pytest.mark.electives
def test_each_demo_takes_the_option(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load(milestone, "demo")
    configs: list[EngineConfig] = []

    def opened(_build: object, config: EngineConfig, _console: object) -> None:
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "open_engine", opened)
    for options in ([], ["--readable"]):
        monkeypatch.setattr(sys, "argv", ["demo", "--model", MODEL, "--device", "cpu", *options])
        with pytest.raises(KeyboardInterrupt):
            demo.main()
    assert [config.readable for config in configs] == [False, True]


@contextmanager
def quitting(model: Any) -> Iterator[None]:
    """Return a context in which each forward raises what `q` at the prompt of pdb raises."""

    def quit_debugger(*_arguments: object) -> None:
        raise BdbQuit

    hook = model.register_forward_pre_hook(quit_debugger)
    try:
        yield
    finally:
        hook.remove()


def test_quitting_a_debugger_ends_the_call(milestone: str, make_engine: EngineFactory) -> None:
    """It is no failure of a forward: no request is tried again, and none ends."""
    engine = make_engine(plain_model(MODEL), readable=True)
    engine.add_request([5, 6, 7], greedy(4), "asked")
    with quitting(engine.loaded.model), pytest.raises(BdbQuit):
        drain(engine)
    assert_one_answer(MODEL, drain(engine)["asked"][-1], 4)


def test_quitting_a_debugger_while_a_model_is_tried_does_not_refuse_it(milestone: str) -> None:
    plain = plain_model(MODEL)
    with quitting(plain.model), pytest.raises(BdbQuit):
        build_engine(milestone, plain, readable=True)


def test_prints_of_an_engine_do_not_mix_with_the_result_of_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Demos compare engines in processes that write JSON. A `print` in a step goes elsewhere."""
    runner = load("m1_single", "model_runner")
    plain = runner.sample

    def printing(*arguments: Any) -> Any:
        sys.stdout.write("a token is sampled\n")  # as `print` does
        return plain(*arguments)

    monkeypatch.setattr(runner, "sample", printing)
    wanted = Workload([[5, 6]], [3], config={"model": MODEL, "device": "cpu", "readable": True})
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(wanted))))
    serve("m1_single")
    gc.freeze()  # as the suite has it
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["token_ids"][0]) == 3
    assert "a token is sampled" in printed.err
