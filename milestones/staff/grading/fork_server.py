"""The process that exams are forked from: `python -m milestones.staff.grading.fork_server`.

It imports the slow libraries and runs no graded code. Its standard input is a socket. A job on this
socket is the name of a file with an exam, and a socket for the events. Each exam runs in its own
process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ...course.testing.probe import Probe
from ...course.testing.server import enter, preload, send
from .exam import SHOWN, Exam, Examiner
from .graded_process import QUESTIONS
from .limits import Limits
from .sandbox import Box, Isolation, end_with_parent, shut_off


def main() -> int:
    """Serve jobs until the other end closes the socket."""
    jobs = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "--bare" not in sys.argv:  # for tests that need no torch
        preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exams that end need no waitpid
    alive, parent = os.pipe()  # `alive` ends with this process
    jobs.sendall(b"r")
    while True:
        message, fds, _, _ = socket.recv_fds(jobs, 4096, 1)
        if not message:
            return 0
        child = os.fork()
        if not child:
            jobs.close()
            os.close(parent)
            _exam(Path(os.fsdecode(message)), fds[0], alive)
        os.close(fds[0])
        jobs.sendall(b"a")


def _exam(job: Path, events: int, alive: int) -> None:
    """Read the job, isolate this process, and run the exam. Does not return."""
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

        emit = partial(send, events)
        emit({"event": "process", "pid": os.getpid()})
        end_with_parent(alive)
        os.close(alive)
        order = json.loads(job.read_text(encoding="utf-8"))
        tree = Path(order["tree"])
        limits = Limits(**order["limits"])
        if order["trusted"]:
            _collect(tree, order, emit)
        else:
            hidden = tuple(map(Path, order["hidden"]))
            box = Box(tree, hidden, limits.disk, order["user"])
            isolation = shut_off(box)
            _settle(tree, isolation)
            emit({"event": "isolation", "missing": isolation.missing})
            exam = Exam(tree, tuple(order["tests"]), limits, order["exercise"], order["seed"])
            Examiner(exam, isolation, emit).run()
            emit({"event": "finished"})
        status = 0
    except BaseException as error:
        emit({"event": "broken", "reason": f"{type(error).__name__}: {error}"})
        raise
    finally:
        os._exit(status)


def _settle(tree: Path, isolation: Isolation) -> None:
    """Enter the tree with a new home folder, and import the modules that are not graded."""
    home = Path("/tmp/home") if isolation.files else Path(tempfile.mkdtemp(dir=tree.parent))
    if isolation.user is not None:
        os.chown(home, isolation.user, isolation.user)
    os.environ.update(HOME=str(home), TMPDIR=str(home), HYPOTHESIS_STORAGE_DIRECTORY=f"{home}/h")
    tempfile.tempdir = None
    enter(tree)
    try:
        common = importlib.import_module("common")
        for name in common.__all__:  # some are imported when they are first used
            getattr(common, name)
    except ImportError:
        return


def _collect(tree: Path, order: dict[str, Any], emit: Any) -> None:
    """Collect the tests of the reference. What is compiled is kept for all submissions."""
    enter(tree)
    sys.dont_write_bytecode = False  # `submission.keep_compiled` copies it for each submission
    exercise = order["exercise"]
    if exercise is not None and exercise not in importlib.import_module(QUESTIONS).QUESTIONS:
        raise LookupError(f"there are no questions for exercise {exercise}")
    emit({"event": "collected", **(_collected(tree, order["tests"]) if order["tests"] else {})})


def _collected(tree: Path, tests: list[str]) -> dict[str, Any]:
    """Return the node ids of tests, and pytest's status and words."""
    events: list[dict[str, Any]] = []
    arguments = ["-p", "no:cacheprovider", "-q", "--collect-only", f"--rootdir={tree}"]
    with tempfile.TemporaryFile() as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        status = int(pytest.main([*arguments, *tests], plugins=[Probe(events.append, tree)]))
        sys.stdout.flush()
        said.seek(0)
        words = said.read().decode(errors="replace")[-SHOWN:]
    nodes = [node for event in events if event["event"] == "collected" for node in event["nodes"]]
    return {"status": status, "nodes": nodes, "words": words}


if __name__ == "__main__":
    sys.exit(main())
