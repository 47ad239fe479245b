"""One suite for all engines.

A test with the argument `milestone` (or `make_engine`, which uses it) runs once for each engine.
Marks say which engines a test is for. `since("m3_paged")` names the first milestone that has the
subject of the test, and `before("m3_paged")` the first milestone that no longer has it.
`pytest --milestone=m2_continuous` runs the tests of one engine.
"""

from __future__ import annotations

import os

# Triton reads this variable when it is imported. The tests use its interpreter, not its compiler.
os.environ.setdefault("TRITON_INTERPRET", "1")
# The suite is for CPUs, also on a machine with a GPU: `device="auto"` must not choose the GPU,
# where kernels would be interpreted. `python -m milestones gpu-check` is for the GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from common import EngineConfig, LoadedModel, OfflineEngine, load_model
from milestones.instruments.audit import MODES, assert_idle, audited_engine_class

ROOT = Path(__file__).resolve().parent.parent
MODE = "overlap"
MILESTONES = sorted(p.name for p in ROOT.iterdir() if re.fullmatch(r"m\d_\w+", p.name))

settings.register_profile(
    "ladder",
    deadline=None,  # timings never decide a test
    derandomize=True,  # the same examples on every machine
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ladder")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--milestone", choices=MILESTONES, help="run the tests of this milestone's engine only"
    )

    parser.addoption(
        "--mode", choices=MODES, default=MODE,
        help="forwards on a thread with or without overlap; as early or as late as events allow",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    global MODE
    if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))  # workers share the cores
    MODE = config.getoption("--mode")
    config.addinivalue_line("markers", "since(milestone): the subject begins at this milestone")
    config.addinivalue_line(
        "markers", "before(milestone): this milestone's lesson removes the subject"
    )
    config.addinivalue_line(
        "markers", "only_of(*files): the subject is in these; equal copies of them are tested once"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "milestone" in metafunc.fixturenames:
        metafunc.parametrize("milestone", _milestones_of(metafunc), scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if wanted := config.getoption("--milestone"):
        kept = [item for item in items if _milestone_of(item) == wanted]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _milestones_of(metafunc: pytest.Metafunc) -> list[str]:
    """Return the milestones that a test is for, as its marks say.

    A mark may name a milestone that does not exist yet.
    """
    marks: dict[str, tuple[str, ...]] = {}
    for mark in metafunc.definition.iter_markers():  # a test's own marks come before its module's
        marks.setdefault(mark.name, mark.args)
    (low,), (high,) = marks.get("since", ("m0",)), marks.get("before", ("m9",))
    names = [name for name in MILESTONES if low <= name < high]
    if files := marks.get("only_of"):
        sources = {name: [(ROOT / name / file).read_bytes() for file in files] for name in names}
        names = [
            n for i, n in enumerate(names) if sources[n] not in [sources[m] for m in names[:i]]
        ]
    return names


def _milestone_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("milestone") if callspec else None


@functools.cache
def shared_model(name: str) -> LoadedModel:
    """Return a model that is loaded once for the whole run. Engines share it."""
    return load_model(EngineConfig(model=name, device="cpu"))


@functools.cache
def plain_model(name: str) -> LoadedModel:
    """Return the model as Hugging Face made it, without our passes. The oracle uses it."""
    return load_model(EngineConfig(model=name, device="cpu"), plain=True)


def build_engine(
    milestone: str, model: str | LoadedModel = "tiny-llama", **config: Any
) -> OfflineEngine:
    """Return an audited engine on a shared model."""
    loaded = shared_model(model) if isinstance(model, str) else model
    config = {"enable_overlap": MODE != "serial", **config}
    return audited_engine_class(milestone, MODE)(
        EngineConfig(model=loaded.name, device="cpu", **config), loaded
    )


def tokens_in_flight(engine: OfflineEngine) -> int:
    """Return the number of tokens in the steps in flight: 0 for an engine without overlap."""
    in_flight = getattr(engine.scheduler, "in_flight", None)
    batches = in_flight.batches if in_flight else ()
    return sum(sum(batch.num_scheduled_tokens) for batch in batches)


EngineFactory = Callable[..., OfflineEngine]
Rung = Callable[[str], ModuleType]


@pytest.fixture
def make_engine(milestone: str) -> Iterator[EngineFactory]:
    """`make_engine(model, **config)` returns an engine.

    After the test, every engine that it made must close, and hold nothing.
    """
    engines: list[OfflineEngine] = []

    def make(model: str | LoadedModel = "tiny-llama", **config: Any) -> OfflineEngine:
        engines.append(build_engine(milestone, model, **config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        assert_idle(engine)


@pytest.fixture
def rung(milestone: str) -> Rung:
    """`rung("scheduler")` imports that module of the milestone under test."""
    return lambda name: importlib.import_module(f"{milestone}.{name}")
