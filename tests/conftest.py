"""One suite for all engines.

A test with the argument `milestone` (or `make_engine`, which uses it) runs once for each engine.
Marks say which engines a test is for. `since("m3_paged")` names the first milestone that has the
subject of the test, and `before("m3_paged")` the first milestone that no longer has it.
`pytest --milestone=m2_continuous` runs the tests of one engine.

The option can be given several times. An elective is one more engine: `--milestone` with its name
runs the whole suite on it.
Without `--milestone`, only those tests run on it that name it in `since`, or that have the mark
`electives`: quick ones, about its files.
"""

from __future__ import annotations

import os

# Triton reads this variable when it is imported. The tests use its interpreter, not its compiler.
os.environ.setdefault("TRITON_INTERPRET", "1")
# The suite is for CPUs, also on a machine with a GPU: `device="auto"` must not choose the GPU,
# where kernels would be interpreted. `python -m milestones gpu-check` is for the GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import functools
import gc
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from common.lazy import lazy_exports
from milestones.chain import (
    chain,
    engines,
    extended,
    load,
    milestones,
    own_name,
    sources,
)
from milestones.lab.instruments.audit import MODES, STREAMS, assert_idle
from tests.helpers.deselected import Deselected, Shard

if TYPE_CHECKING:
    from common import LLMEngine, LoadedModel
    from tests.helpers.shared_models import build_engine, plain_model, shared_model  # noqa: F401
else:  # when a file of tests imports them: tests of plain data start without torch
    __getattr__ = lazy_exports(
        __name__,
        dict.fromkeys(
            ("build_engine", "plain_model", "shared_model"), "tests.helpers.shared_models"
        ),
    )

ROOT = Path(__file__).resolve().parent.parent
MODE = DEFAULT_MODE = "overlap"
THOROUGH = False
MILESTONES = milestones(ROOT)
ENGINES = engines(ROOT)  # the milestones, and then the electives
CHAINS = {name: chain(name, ROOT) for name in ENGINES}
UNDER_TEST: list[str] = []  # the chain of the engine that the running test is for
MOST_CAPTURED_LINES = 100  # of a section of a failed test's report
ONE_MODE = ("electives", "one_mode")  # marks of tests of files and of the server's connections
# Only these engines differ in their modes.
WITH_STREAM = [name for name in ENGINES if "stream.py" in sources(name, ROOT)]

settings.register_profile(
    "ladder",
    deadline=None,  # timings never decide a test
    derandomize=True,  # the same examples on every machine
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ladder")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--milestone", action="append", default=[], choices=ENGINES,
        help="run the tests of this engine only; can be given several times",
    )  # fmt: skip
    parser.addoption(
        "--mode", choices=MODES, default=DEFAULT_MODE,
        help="forwards on a thread with or without overlap; as early or as late as events allow",
    )  # fmt: skip
    parser.addoption("--thorough", action="store_true", help="run the second tier, too")
    parser.addoption(
        "--rest", action="store_true",
        help="with --thorough: leave out what a run without it, and without extras, has run",
    )  # fmt: skip
    parser.addoption("--shard", default="1/1", help="run one of several parts only, such as 2/3")


def pytest_configure(config: pytest.Config) -> None:
    global MODE, THOROUGH
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        import torch

        threads = max(1, (os.cpu_count() or 1) // workers)  # workers share the cores,
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # and so do the processes that tests start
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a job in a shell's background has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    MODE = config.getoption("--mode")
    THOROUGH = config.getoption("--thorough")
    shard = Shard.parse(config.getoption("--shard"))
    config.pluginmanager.register(Deselected(THOROUGH, config.getoption("--rest"), shard))
    config.addinivalue_line("markers", "extra(name): the test needs the packages of this extra")
    config.addinivalue_line("markers", "since(milestone): the subject begins at this milestone")
    config.addinivalue_line(
        "markers", "before(*engines): the lessons of these engines remove the subject"
    )
    config.addinivalue_line(
        "markers",
        "electives: about files. Run it on the electives without --milestone too, in one mode only",
    )
    config.addinivalue_line(
        "markers",
        "thorough(reason, fast_on=()): the second tier, which `make test-all` runs. On the engines "
        "in fast_on, the test is in the first tier",
    )
    config.addinivalue_line("markers", "one_mode: it does not depend on the mode of the engine")
    config.addinivalue_line("markers", "cpu: `make test-all` runs it on narrower kinds of CPU too")
    config.addinivalue_line(
        "markers",
        "streams(electives=True): the moment when a forward ends matters: it also runs on early "
        "and late streams, of m5 and its electives, or of m5 only",
    )
    config.addinivalue_line(
        "markers", "only_of(*files): the subject is in these; equal copies of them are tested once"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "milestone" in metafunc.fixturenames:
        metafunc.parametrize("milestone", _milestones_of(metafunc), scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted: list[Any] = [*_chosen(config)] or [None, *ENGINES]
    kept = [item for item in items if _milestone_of(item) in wanted]
    if MODE != DEFAULT_MODE:
        kept = [item for item in kept if not any(map(item.get_closest_marker, ONE_MODE))]
    if MODE in STREAMS and not config.getoption("--milestone"):
        kept = [item for item in kept if _depends_on_the_stream(item)]
    dropped = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    UNDER_TEST[:] = CHAINS.get(_milestone_of(item) or "", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.sections = [(title, shortened(text)) for title, text in report.sections]
    return report


def shortened(captured: str) -> str:
    """Return the end of what a test logged or printed.

    With a scheduler that fails in every step, one test would log thousands of tracebacks.
    """
    lines = captured.splitlines()
    if len(lines) <= MOST_CAPTURED_LINES:
        return captured
    left_out = len(lines) - MOST_CAPTURED_LINES
    return "\n".join([f"({left_out} lines before these)", *lines[left_out:]])


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections need not look at the modules and the tests, a million objects


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind warns about what is left at the end


def _chosen(config: pytest.Config) -> list[str]:
    """Return the engines that a run is for: those that can differ in its mode. [] is all."""
    named: list[str] = config.getoption("--milestone")
    return named or (WITH_STREAM if MODE != DEFAULT_MODE else [])


def _depends_on_the_stream(item: pytest.Item) -> bool:
    marks = item.iter_markers("streams")
    is_elective = _milestone_of(item) not in MILESTONES
    return any(mark.kwargs.get("electives", True) or not is_elective for mark in marks)


def _milestones_of(metafunc: pytest.Metafunc) -> list[str]:
    """Return the engines that a test is for, as its marks and `--milestone` say.

    A mark may name a milestone that does not exist yet.
    """
    marks: dict[str, tuple[str, ...]] = {}
    for mark in metafunc.definition.iter_markers():  # a test's own marks come before its module's
        marks.setdefault(mark.name, mark.args)
    (first,), ends = marks.get("since", MILESTONES[:1]), {*marks.get("before", ())}
    names = [name for name, lessons in CHAINS.items() if first in lessons and not ends & {*lessons}]
    wanted = {*MILESTONES, first, *_chosen(metafunc.config)}
    wanted |= set(ENGINES) if "electives" in marks else set()
    names = [name for name in names if name in wanted]
    if files := marks.get("only_of"):
        texts = {name: [_text(name, file) for file in files] for name in names}
        names = [n for i, n in enumerate(names) if texts[n] not in [texts[m] for m in names[:i]]]
    return names


@functools.cache
def _text(name: str, file: str) -> bytes:
    """Return a file of an engine, or nothing if the engine does not have it."""
    path = sources(name, ROOT).get(file)
    return path.read_bytes() if path else b""


def _milestone_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("milestone") if callspec else None


def tokens_in_flight(engine: LLMEngine) -> int:
    """Return the number of tokens in the steps in flight: 0 for an engine without overlap."""
    in_flight = getattr(engine.core.scheduler, "in_flight", None)
    batches = in_flight.batches if in_flight else ()
    return sum(sum(batch.num_scheduled_tokens) for batch in batches)


EngineFactory = Callable[..., "LLMEngine"]
ModuleOf = Callable[[str], ModuleType]


def schedules(count: int) -> int:
    """Return how many random schedules a test runs: the first tier runs a fifth of `count`."""
    return count if THOROUGH else max(20, count // 5)


@pytest.fixture
def make_engine(milestone: str) -> Iterator[EngineFactory]:
    """`make_engine(model, **config)` returns an engine.

    After the test, every engine that it made must close, and hold nothing.
    """
    from tests.helpers.shared_models import build_engine

    engines: list[LLMEngine] = []

    def make(model: str | LoadedModel = "tiny-llama", **config: Any) -> LLMEngine:
        engines.append(build_engine(milestone, model, **config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert_idle(engine)


@pytest.fixture
def module_of(milestone: str) -> ModuleOf:
    """`module_of("scheduler")` imports that module of the milestone under test."""
    return lambda name: load(milestone, name)


@pytest.fixture
def code_of(milestone: str) -> ModuleOf:
    """`code_of("scheduler")` is the module with the code of a milestone's `scheduler.py`.

    If the file of an elective extends it, this module is not `module_of("scheduler")`. A test must
    replace a global name in the module where the code looks it up.
    """
    bases = {own_name(file): file.removesuffix(".py") for file in extended(milestone, ROOT)}
    return lambda name: load(milestone, bases.get(f"{name}.py", name))
