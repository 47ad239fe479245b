"""A server that forks runs the tests of a tree: its reports, its limits, and what it survives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from milestones.course.testing import probe
from milestones.course.testing.results import Result, Run
from milestones.course.testing.runner import Runner, RunnerError
from tests.conftest import ROOT
from tests.helpers import mini_course

SHELF = "m2_mini/shelf.py"
FIRST, SECOND = "tests/exercises/test_m2_1.py", "tests/exercises/test_m2_2.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return mini_course.make(tmp_path)


def run(tree: Path, *tests: str, seconds: float = 60) -> Run:
    return mini_course.shared_runner().run(tree, tests, seconds=seconds)


def replaced(tree: Path, old: str, new: str, file: str = SHELF) -> Path:
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    return tree


def failed(done: Run) -> Result:
    assert done.first_failure is not None and done.first_failure.failure is not None
    return done.first_failure


def test_what_passes(tree: Path) -> None:
    done = run(tree, FIRST, SECOND)
    assert done.passed and done.error is None
    assert [r.node for r in done.results] == [
        f"{FIRST}::test_items_are_counted", f"{FIRST}::test_a_full_shelf_refuses",
        f"{SECOND}::test_the_sum", f"{SECOND}::test_the_largest",
    ]  # fmt: skip
    assert not list(tree.rglob("__pycache__")) and not (tree / ".pytest_cache").exists()


def test_each_tree_has_its_own_modules(tree: Path) -> None:
    """Versions with the same module names and file sizes run one after the other in one server."""
    assert run(tree, FIRST).passed
    replaced(tree, "self.items.append(item)", "self.items.extend([])  ")
    assert not run(tree, FIRST).passed
    replaced(tree, "self.items.extend([])  ", "self.items.append(item)")
    assert run(tree, FIRST).passed


FSUM = next(n for n, text in enumerate(mini_course.SHELF.splitlines(), 1) if "fsum" in text)
PEEK = "def peek(shelf):\n    raise shelf.error\n\n\ndef test_items_are_counted"
# What replaces what, and where; the tests that run; facts of the failure.
FAILURES: dict[str, tuple[list[tuple[str, str, str]], str, dict[str, str | None]]] = {
    "a wrong value": (
        [("return len(self.items)", "return 1", SHELF)], FIRST,
        {
            "kind": "AssertionError", "called": "shelf.put(5)", "returned": "1", "expected": "2",
            "message": "I3: an item is lost", "test_line": f"{FIRST}:11", "where": None,
        },
    ),
    # pytest does not say at which place of a chain.
    "a chain of comparisons": (
        [("shelf.put(7) == 1", "0 <= shelf.put(1) < 1", FIRST)], FIRST,
        {"called": "0 <= shelf.put(1) < 1", "returned": "1 < 1, which is false", "expected": None},
    ),
    "an error that a helper raises": (
        [
            ("def test_items_are_counted", PEEK, FIRST),
            ("assert shelf.put(7) == 1", "got = peek(shelf)", FIRST),
            ("= deque()", "= deque(); self.error = KeyError()", SHELF),
        ],
        FIRST, {"kind": "KeyError", "called": "got = peek(shelf)"},
    ),
    "an error that did not come": (
        [(">= ROOM", ">= ROOM + 1", SHELF)], FIRST,
        {"called": "shelf.put(3)", "returned": "no error", "expected": "ValueError"},
    ),
    "an error of the code": (
        [("math.fsum(self.items)", "self.itens[0]", SHELF)], SECOND,
        {
            "kind": "AttributeError", "where": f"{SHELF}:{FSUM} in total",
            "called": "assert shelf.total() == 5", "returned": None,
        },
    ),
    "an import": (
        [("import math", "import meth", SHELF)], SECOND,
        {"kind": "ModuleNotFoundError", "message": "No module named 'meth'"},
    ),
    "a syntax error": (
        [("return max(shelf.items)", "return max(shelf.items", SHELF)], SECOND,
        {
            "kind": "SyntaxError", "message": "'(' was never closed",
            "source": "return max(shelf.items\n          ^",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_failure_says(tree: Path, name: str) -> None:
    """What was called, what was returned, what was expected, and where."""
    replacements, tests, facts = FAILURES[name]
    for old, new, file in replacements:
        replaced(tree, old, new, file)
    why = failed(run(tree, tests)).failure
    assert why is not None and {fact: getattr(why, fact) for fact in facts} == facts


def test_an_environment_in_the_tree_is_no_code_of_the_student(tree: Path) -> None:
    """An installed package may have a frame between pytest and the test, as pytest itself has."""
    package = tree / ".venv/lib/python3/site-packages/between.py"
    package.parent.mkdir(parents=True)
    package.write_text("def call(test):\n    return lambda: test()\n")
    head = f"import sys\nsys.path.append({str(package.parent)!r})\nfrom between import call\n"
    replaced(tree, "def test_items", "@call\ndef test_items", FIRST)
    (tree / FIRST).write_text(head + (tree / FIRST).read_text())
    replaced(tree, "return len(self.items)", "return 1")
    why = failed(run(tree, FIRST)).failure
    assert why is not None and why.where is None and why.returned == "1"
    replaced(tree, "self.items.append(item)", "self.itens.append(item)")
    why = failed(run(tree, FIRST)).failure
    assert why is not None and why.where is not None and why.where.startswith(f"{SHELF}:")


@pytest.mark.parametrize(
    "advice", ["  Use -v to get more diff", "  ...Full output truncated (7 lines hidden), use"]
)
def test_pytests_own_advice_is_left_out(advice: str) -> None:
    """Pytest advises to use `-v`, and `check` has no such option."""
    said = "I3: lost\nassert [2] == [0]\n  \n  At index 0 diff: 2 != 0"
    assert probe.without_advice(f"{said}\n{advice}") == said


@pytest.mark.parametrize("line", ["{error}", "try:\n            {error}\n        finally: 1 // 0"])
def test_what_is_not_written_is_known(tree: Path, line: str) -> None:
    """This holds even if another error has replaced the `NotImplementedError`."""
    error = 'raise NotImplementedError("m2.2: Shelf.total is yours to write; see ...")'
    replaced(tree, "return math.fsum(self.items) + SECRET - SECRET", line.format(error=error))
    done = run(tree, SECOND)
    assert [result.unwritten for result in done.results] == [("m2.2",), ()]


def test_errors_that_came_after_each_other_end() -> None:
    """Errors can be each other's context, for example when one is raised again after another."""
    first, second = NotImplementedError("m2.1: f is yours to write"), KeyError()
    first.__context__, second.__context__ = second, first
    assert list(probe.unwritten(second)) == ["m2.1"]

    class Group(Exception):  # like an ExceptionGroup, which Python 3.10 does not have
        exceptions = (ValueError(), first)

    assert list(probe.unwritten(Group())) == ["m2.1"]


@pytest.mark.parametrize(
    ("line", "outcome"), [("while True: pass", "timeout"), ("__import__('os')._exit(0)", "crashed")]
)
def test_a_test_that_hangs_or_crashes_costs_itself(tree: Path, line: str, outcome: str) -> None:
    """No test runs after one that hangs, if this is asked."""
    replaced(tree, "assert shelf.put(7) == 1", line, FIRST)
    done = run(tree, FIRST, SECOND, seconds=0.5)
    assert [r.outcome for r in done.results] == [outcome, "passed", "passed", "passed"]
    if outcome == "timeout":
        assert "0.5 s" in (failed(done).failure or pytest.fail()).message
        done = mini_course.shared_runner().run(tree, [FIRST], seconds=0.5, stop_at_timeout=True)
        assert [r.outcome for r in done.results] == ["timeout"] and not done.passed
        assert done.not_run == (f"{FIRST}::test_a_full_shelf_refuses",)


def test_a_test_that_hangs_shows_the_stacks_of_all_threads(tree: Path) -> None:
    """The test waits for a thread that waits too: both places are named, the own line first."""
    (tree / "m2_mini/waits.py").write_text(
        "import threading\ndef never(event: threading.Event) -> None:\n    event.wait()\n"
    )
    replaced(
        tree, "    assert shelf.put(7) == 1",
        "    import threading\n    from m2_mini.waits import never\n"
        "    threads = [threading.Thread(target=never, args=[threading.Event()]) for _ in '12']\n"
        "    [thread.start() for thread in threads]\n    never(threading.Event())", FIRST,
    )  # fmt: skip
    why = failed(run(tree, FIRST, seconds=1)).failure
    assert why is not None and why.kind == "timeout"
    assert why.where == "m2_mini/waits.py:3 in never"
    assert why.test_line is not None and why.test_line.startswith(f"{FIRST}:")
    assert "thread 1 of 3" in why.stacks and "thread 3 of 3" in why.stacks
    assert why.stacks.count("m2_mini/waits.py:3 in never") == 3
    assert "threading.py" in why.trace and "site-packages" not in why.stacks


@pytest.mark.parametrize("error", ["KeyboardInterrupt()", "__import__('pytest').exit('bye')"])
def test_an_error_that_ends_pytest_costs_its_own_test(tree: Path, error: str) -> None:
    """pytest stops at a KeyboardInterrupt. The tests after it have results all the same."""
    raising = f"raise {error}" if "()" in error else error
    replaced(tree, "        if len(self.items) >= ROOM:", f"        if item == 5: {raising}\n"
             "        if len(self.items) >= ROOM:")  # fmt: skip
    done = run(tree, FIRST, SECOND)
    assert [r.outcome for r in done.results] == ["failed", "passed", "passed", "passed"]
    why = failed(done).failure
    assert why is not None and why.kind == ("KeyboardInterrupt" if "()" in error else "Exit")
    assert why.where is not None and why.where.startswith(SHELF)


def test_a_run_that_ends_before_its_tests_is_no_pass(tree: Path) -> None:
    (tree / "tests/conftest.py").write_text("def pytest_runtestloop(session):\n    return True\n")
    done = run(tree, FIRST)
    assert not done.passed and "before it ran" in (done.error or "")


@pytest.mark.parametrize(("body", "outcome"), [("pass", "crashed"), ("assert 0", "failed")])
def test_a_process_that_ends_after_a_test_costs_that_test(
    tree: Path, body: str, outcome: str
) -> None:
    """Damage to memory may show only when the memory is freed, after the end of the test."""
    replaced(tree, "shelf = Shelf()\n    assert shelf.put(7) == 1", body + "\n    return", FIRST)
    (tree / "tests/conftest.py").write_text(
        "import os, pytest\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_runtest_logfinish(nodeid):\n"
        "    if nodeid.endswith(('counted', 'largest')): os._exit(1)\n"
    )
    done = run(tree, FIRST, SECOND)
    assert [r.outcome for r in done.results] == [outcome, "passed", "passed", "crashed"]
    last = done.results[-1].failure
    assert last is not None and last.message.startswith("after the test passed: the process")
    assert done.error is None


def test_what_is_wrong_beside_the_tests_is_said(tree: Path) -> None:
    assert "test_nothing" in (run(tree, f"{FIRST}::test_nothing").error or "")
    (tree / "tests/conftest.py").write_text("import nonsense\n")
    done = run(tree, FIRST)
    assert not done.passed and "nonsense" in (done.error or "")


def test_forking_is_safe(tree: Path) -> None:
    """The server has one thread after all its imports, and its forks can compute with tensors.

    A large product would start the threads of OpenMP, if the server did not forbid it. A fork that
    waited for threads of its parent would hang here.
    """
    (tree / FIRST).write_text(
        "import os, torch\n"
        "def test_it_computes():\n"
        "    a = torch.randn(512, 512)\n"
        "    assert (a @ a).isfinite().all() and (a.exp().sum() > 0)\n"
        "def test_threads():\n"
        "    import threading\n"
        "    parent = f'/proc/{os.getppid()}/task'\n"
        "    assert len(os.listdir(parent)) == 1\n"
        "    assert torch.get_num_threads() == 1\n"
    )
    for _ in range(3):
        assert run(tree, FIRST, seconds=30).passed


def test_a_big_library_waits_for_a_test_that_needs_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of plain data run without torch. They have a short limit, even when torch is there."""
    hang = "def test_it():\n    while True: pass\n"
    (tree / FIRST).write_text("import sys\nassert 'torch' not in sys.modules\n" + hang)
    (tree / SECOND).write_text("import torch\ndef test_it():\n    torch.ones(1)\n")
    monkeypatch.setattr("milestones.course.testing.supervised_run.SECONDS_PLAIN", 0.5)
    imported: list[str] = []
    with Runner() as runner:

        def plain_ends(test: str) -> bool:
            done = runner.run(tree, [test], on_import=imported.append)
            return "after 0.5 s" in (failed(done).failure or pytest.fail()).message

        assert plain_ends(FIRST) and imported == []
        for _ in range(2):
            assert runner.run(tree, [SECOND], on_import=imported.append).passed
            assert imported == ["torch"]
        (tree / FIRST).write_text(hang)
        assert plain_ends(FIRST)


def test_a_server_with_threads_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from milestones.course.testing import server

    events: list[dict[str, object]] = []
    monkeypatch.setattr(server, "num_threads", lambda: 2)
    monkeypatch.setattr(server.os, "fork", lambda: pytest.fail("it forked"))
    server.serve({}, events.append, [])
    assert [event["event"] for event in events] == ["refused"]


def test_without_forks_the_results_are_the_same(tree: Path) -> None:
    replaced(tree, "return len(self.items)", "return 1")
    with Runner(fork=False) as runner:
        fresh = runner.run(tree, [FIRST])
    forked = run(tree, FIRST)
    strip = [(r.node, r.outcome, r.failure and r.failure.called) for r in fresh.results]
    assert strip == [(r.node, r.outcome, r.failure and r.failure.called) for r in forked.results]


def test_a_server_that_ends_says_why(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tree))
    (tree / "pytest.py").write_text("raise SystemExit('no pytest today')\n")
    with Runner() as runner:
        monkeypatch.setattr("milestones.course.testing.runner.ROOT", tree)
        with pytest.raises(RunnerError, match="no pytest today"):
            runner.run(tree, [FIRST])


def test_nothing_runs_on_when_its_client_is_gone(tree: Path) -> None:
    """The test that hangs, the process it has started, and the server all end."""
    (tree / FIRST).write_text(
        "import os, subprocess, time\n"
        "def test_it_hangs():\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    open('pids', 'w').write(f'{os.getppid()} {os.getpid()} {child.pid} end')\n"
        "    time.sleep(600)\n"
    )
    code = (
        "import sys; from pathlib import Path; from milestones.course.testing.runner import Runner;"
        "Runner().run(Path(sys.argv[1]), [sys.argv[2]])"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tree), FIRST], cwd=ROOT) as client:
        wait_until(lambda: (tree / "pids").exists() and "end" in (tree / "pids").read_text())
        client.kill()
    pids = (tree / "pids").read_text().split()[:-1]
    wait_until(lambda: not any(map(runs, pids)))


def runs(pid: str) -> bool:
    """Return whether a process runs. A zombie does not: it has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
