"""A process that has imported pytest and the big libraries, and runs tests in forks of itself.

`python -m milestones.course.testing.server` reads requests from its standard input, one line of
JSON each (the tree, the tests). It writes events to its standard output. Its client is `runner.py`.
The server imports nothing of a tree; each fork does. A big library is imported when the first fork
needs it (see `libraries.py`). With `--once` the server runs one request itself, and ends.

A fork is safe while the process has only one thread: then no other thread holds a lock, and no
OpenMP pool has threads that the fork would miss. C libraries are therefore told to use one thread
before they are loaded, and no tensor is made here. The server counts its threads before each fork,
and refuses to fork if there are more.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from . import stacks
from .libraries import BIG, OF_A_TREE, EndAtImport, import_all, needed
from .probe import Emit, Probe
from .terminal import no_terminal

HYPOTHESIS = "_hypothesis_pytestplugin"
SMALL = ("hypothesis", "rich.console", "rich.table")  # tests/conftest.py needs them
# Of the installed plugins, only Hypothesis is loaded; the environment disables the others.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", HYPOTHESIS)


def main() -> int:
    """Serve requests until the input ends."""
    events = os.dup(1)
    os.dup2(2, 1)  # prints go to stderr, so that they do not mix with the events

    emit = partial(send, events)
    if "--once" in sys.argv:
        emit({"event": "ready"})
        return run(json.loads(sys.stdin.readline()), emit)
    preload(())
    absent = [*BIG]
    emit({"event": "ready"})
    for line in sys.stdin:
        serve(json.loads(line), emit, absent)
    return 0


def send(descriptor: int, what: Any) -> None:
    """Write a line of JSON to a descriptor."""
    data = json.dumps(what).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def preload(libraries: Iterable[str] = BIG) -> None:
    """Import what all tests need, and big libraries."""
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*OPTIONS, "--help", "--noconftest", "-c", os.devnull])  # imports its plugins
    import_all([*SMALL, *(module for name in libraries for module in BIG[name])])


def num_threads() -> int:
    """Return the number of threads of this process; on Linux, with those of C libraries."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def serve(request: dict[str, Any], emit: Emit, absent: list[str]) -> None:
    """Run a request in a fork, and wait for it. If the fork needs an absent library, run it again.

    absent: the big libraries that this process has not imported.
    """
    if (threads := num_threads()) != 1:
        emit(
            {"event": "refused", "reason": f"a fork is not safe: the server has {threads} threads"}
        )
        return
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        sys.meta_path.insert(0, EndAtImport(absent))
        in_fork(lambda: run(request, emit))
    status = waited(child)
    if library := needed(os.waitstatus_to_exitcode(status), absent):
        emit({"event": "importing", "library": library})
        import_all(BIG[library])
        absent.remove(library)
        serve(request, emit, absent)
        return
    emit({"event": "exit", "status": status})


def waited(child: int) -> int:
    """Wait for a fork. Return its exit status, after all processes that it left were killed.

    If the client ends meanwhile, it closes our input. Then kill the fork and end this process too.
    """
    fork = os.pidfd_open(child)
    watched = select.poll()
    watched.register(fork, select.POLLIN)
    watched.register(0, select.POLLHUP)
    gone = fork not in [fd for fd, _ in watched.poll()]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.close(fork)
    status = os.waitpid(child, 0)[1]
    if gone:
        os._exit(1)
    return status


def in_fork(work: Callable[[], int]) -> None:
    """Work and end, whatever happens, without the exit handlers of the server."""
    status = 70
    try:
        status = work()
    finally:
        os._exit(status)


def run(request: dict[str, Any], emit: Emit) -> int:
    """Run the tests of a request in its tree. Return pytest's exit status."""
    tree = Path(request["tree"]).resolve()
    emit({"event": "process", "pid": os.getpid()})
    if request.get("stacks"):
        stacks.write_on_signal(request["stacks"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.breakpointhook = no_terminal
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        enter(tree)
        arguments = [*OPTIONS, f"--rootdir={tree}", *request.get("options", ()), *request["tests"]]
        status = int(pytest.main(arguments, plugins=[Probe(emit, tree)]))
        sys.stdout.flush()
        sys.stderr.flush()
        printed.seek(0)
        output = printed.read().decode(errors="replace")[-4000:]
    emit({"event": "finished", "status": status, "output": output})
    return status


def enter(tree: Path) -> None:
    """Make this process like a fresh Python in the tree: its folder, path and modules."""
    os.chdir(tree)
    home = Path(__file__).resolve().parents[3]
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path) != home)]
    for name in [name for name in sys.modules if OF_A_TREE.match(name)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True


if __name__ == "__main__":
    sys.exit(main())
