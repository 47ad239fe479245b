"""Check that graded code did not replace the functions that judge a test.

Graded code shares the interpreter with pytest. It can replace `torch.equal` or a function of pytest
like any other name. This module notices that, and it also runs checks with a known outcome. Code
that writes directly to the interpreter's memory cannot be detected from inside; see `exam.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

WATCHED = (
    "builtins", "collections", "copy", "dataclasses", "functools", "io", "itertools", "json",
    "math", "operator", "os", "re", "statistics", "threading", "time", "types", "random",
    "pytest", "_pytest", "pluggy", "unittest.case", "unittest.mock",
    "hypothesis", "hypothesis.core", "hypothesis.stateful", "hypothesis.strategies",
    "numpy", "numpy.testing", "torch", "torch.testing", "torch.testing._comparison",
    "torch.nn.functional", "torch.linalg", "common",
)  # fmt: skip
PACKAGES = ("_pytest", "pluggy", "common")  # including their submodules
CLASSES = (("torch", "Tensor"), ("torch._C", "TensorBase"))
REPLACED = {"sys.excepthook", "threading.excepthook"}  # pytest replaces these during a test
MISSING = object()
_ASSERTION, _KEY, _ANY = AssertionError, KeyError, BaseException  # the original classes


class Integrity:
    """Remembers the watched functions and classes when it is made. `problems` compares them."""

    def __init__(self) -> None:
        self.seen = [(owner, name, value, _inside(value)) for owner, name, value in _watched()]

    def problems(self) -> list[str]:
        """Return which functions were replaced, and which checks have a wrong outcome."""
        found = []
        for owner, name, value, inside in self.seen:
            now = vars(owner).get(name, MISSING)
            if now is not value or _inside(value) != inside:
                found.append(f"{owner.__name__}.{name} has been replaced")
        return found + [f"{what} does not work any more" for what, true in _truths() if not true]


def _watched() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and value of each watched function and class."""
    for name in sorted(sys.modules):
        below = name.startswith(tuple(f"{package}." for package in PACKAGES))
        module = sys.modules[name]
        if isinstance(module, ModuleType) and (name in WATCHED or below):
            yield from _callables(module)
            if below or name == "common":
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__ == name:
                        yield from _callables(value)
    for module_name, name in CLASSES:
        if module_name in sys.modules:
            yield from _callables(getattr(sys.modules[module_name], name))


def _callables(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    for name, value in list(vars(owner).items()):
        acts = callable(value) or isinstance(value, (property, staticmethod, classmethod))
        if acts and f"{owner.__name__}.{name}" not in REPLACED:
            yield owner, name, value


def _inside(value: Any) -> tuple[Any, ...]:
    """Return the parts of a function that can be changed without replacing the function."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType):
        return ()
    return value.__code__, value.__defaults__, value.__kwdefaults__ and dict(value.__kwdefaults__)


def _truths() -> Iterator[tuple[str, bool]]:
    """Yield checks that must be true in an unchanged interpreter."""
    yield "1 != 2", [1] != [2] and "a" != "b" and {1: 2} != {1: 3}
    yield "not all([False])", not all([False]) and not any([False]) and sum([1, 1]) == 2
    yield "sorted, len and isinstance", sorted([2, 1]) == [1, 2] and not isinstance(1, str)
    yield "an assert that fails", _raises(_fail, _ASSERTION)
    yield "pytest.raises without an error", _raises(_raises_nothing, _ANY)
    yield "pytest.raises with another error", _raises(_raises_other, _KEY)
    if torch := sys.modules.get("torch"):
        one, two = torch.ones(2), torch.ones(2) * 2
        yield "torch.equal", not torch.equal(one, two) and not bool((one == two).any())
        yield "torch.allclose", not torch.allclose(one, two)
        close = sys.modules["torch.testing"].assert_close
        yield "torch.testing.assert_close", _raises(lambda: close(one, two), _ASSERTION)


def _raises(work: Callable[[], Any], kind: type[BaseException]) -> bool:
    try:
        work()
    except _ANY as error:
        return isinstance(error, kind)
    return False


def _fail() -> None:
    assert 1 == 2


def _raises_nothing() -> None:
    with pytest.raises(ValueError):
        pass


def _raises_other() -> None:
    with pytest.raises(ValueError):
        raise KeyError


def prepare() -> None:
    """Import the watched modules while no graded code has run."""
    for name in (*WATCHED, "torch._C"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
