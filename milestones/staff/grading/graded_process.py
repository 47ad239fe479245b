"""A process with graded code: it answers the questions of an exercise, or runs its tests.

`exam.py` forks it. Graded code can change everything in here, so what this process says proves
nothing by itself. An answer counts if it is right, and the right answers are not in this process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ...course.testing.probe import Probe
from ...course.testing.server import send
from .answers import LONGEST_TEXT, readable, seeds_of

OPTIONS = (
    "-p", "no:cacheprovider", "-p", "no:junitxml", "-q", "--tb=short", "-o", "addopts=",
    "-p", "no:faulthandler", "--capture=no",  # what a test prints needs no space on a disk
)  # fmt: skip
QUESTIONS = "tests.questions"  # the module of each tree with the questions of its exercises
OUT_OF_TIME = "still running at its time limit: an endless loop?"
NOT_GRADED = ("tests", "milestones", "common")  # folders of a tree


def answer(exercise: str, seed: int, tree: Path, says: int, log: int, seconds: float) -> NoReturn:
    """Say "[]" when the code is imported, and then a line for each seed: [seed, answers, error]."""
    _prepare(log, seconds)
    try:
        ask, count = importlib.import_module(QUESTIONS).QUESTIONS[exercise]
    except BaseException as error:
        send(says, [])
        send(says, [-1, None, f"{type(error).__name__}: {error}"[:LONGEST_TEXT]])
        os._exit(0)
    send(says, [])
    limit, seeds = seconds / 4, seeds_of(seed, count)
    for seed in seeds:
        data = answered(ask, seed, tree, limit)
        if OUT_OF_TIME in str(data[2]):
            limit = seconds / len(seeds) / 2  # its code hangs: the other seeds have less time
        send(says, shortened(data))
    os._exit(0)


def answered(ask: Any, seed: int, tree: Path, seconds: float) -> list[Any]:
    """Return the answers of one seed: [seed, [[kind, question, answer], ...], error].

    After `seconds`, an endless loop ends with an error, so that the next seed has its turn.
    """
    answers: list[Any] = []
    try:
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for kind, question, value in ask(random.Random(seed)):
            answers.append([kind, question, plain(value)])
        signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return [seed, answers, f"{type(error).__name__}: {error}{_place(error, tree)}"]
    return [seed, answers, None]


def _out_of_time(*_: object) -> None:
    raise TimeoutError(OUT_OF_TIME)


def _place(error: BaseException, tree: Path) -> str:
    """Return the innermost line of the milestone's code in a traceback, in words."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if tree in (path := Path(frame.filename)).parents:
            inside = path.relative_to(tree)
            if inside.parts[0] not in NOT_GRADED:
                return f", at {inside}:{frame.lineno} in {frame.name}"
    return ""


def plain(value: Any) -> Any:
    """Return a value as JSON can have it. Other types are an error of the graded code."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, Iterable):
        return [plain(inner) for inner in value]
    raise TypeError(f"an answer has a {type(value).__name__}")


def sit(tests: Iterable[str], tree: Path, says: int, log: int, seconds: float) -> NoReturn:
    """Run tests, and say each result as it comes."""
    _prepare(log, seconds)

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "result":
            send(says, {"result": shortened(event["result"])})
            _watch(log, seconds)

    arguments = [*OPTIONS, f"--rootdir={tree}", *tests]
    try:
        status = pytest.main(arguments, plugins=[Probe(tell, tree)])
        ended = f"pytest ended with {status!r}"
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # a student may have closed or replaced it
        sys.stdout.flush()
    send(says, {"ended": ended[:LONGEST_TEXT]})
    os._exit(0)


def shortened(value: Any) -> Any:
    """Return plain data in which no text is long, and each text can be encoded."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [shortened(inner) for inner in value]
    return value


def _prepare(log: int, seconds: float) -> None:
    """Send output and, shortly before the time limit, the stacks of all threads to the log."""
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable(log)
    _watch(log, seconds)
    sys.breakpointhook = _no_debugger


def _watch(log: int, seconds: float) -> None:
    """Send the stacks of all threads to the log after almost `seconds` from now."""
    faulthandler.dump_traceback_later(max(seconds - 0.5, seconds / 2), file=log)


def _no_debugger(*_: object, **__: object) -> None:
    raise RuntimeError("a breakpoint() is left in the code, and no person is here to use it")
