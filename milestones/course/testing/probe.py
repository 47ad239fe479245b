"""`Probe`: a pytest plugin that reports what each test did, and why a test failed, as data."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from .called import called_by, statement_at
from .libraries import EndAtImport, is_plain
from .results import Failure, Outcome, Result, with_caret

UNWRITTEN = re.compile(r"(\w+\.\d+): ")
LONGEST = 300  # characters of a value that are kept
MOST_CALLS = 30  # lines of functions that had not returned
MOST_PRINTED = 2000  # characters of what a test has printed

Emit = Callable[[dict[str, Any]], None]


class Probe:
    """Sends an event when tests are collected, when a test starts, and when it has a result."""

    def __init__(self, emit: Emit, tree: Path) -> None:
        self.emit = emit
        self.tree = tree
        self.compared: tuple[str, str, str] | None = None  # operator, left, right
        self.failure: Failure | None = None
        self.outcome: Outcome = "passed"
        self.seconds = 0.0
        self.title = ""
        self.printed = ""
        self.running: str | None = None
        self.file: Path | None = None  # of the running test

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # From here on, a test may have run: a library is imported where it is needed.
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, EndAtImport)]
        nodes = [item.nodeid for item in session.items]
        self.emit({"event": "collected", "nodes": nodes, "plain": is_plain()})

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
        self.title = doc.strip().split("\n")[0]
        self.file = item.path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.compared = self.failure = None
        self.outcome, self.seconds, self.title, self.printed = "passed", 0.0, "", ""
        self.running = nodeid
        self.emit({"event": "start", "node": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.skipped:
            self.outcome = "skipped"
        elif report.failed and self.outcome == "passed":
            self.outcome = "failed" if report.when == "call" else "error"
            self.printed = (report.capstdout + report.capstderr)[-MOST_PRINTED:]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        result = Result(nodeid, self.outcome, self.seconds, self.title, self.printed, self.failure)
        self._send(result)
        self.running = None

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Report a test that ends pytest itself. The tests after it run in another process."""
        if self.running is not None:
            failure = self._failure(excinfo.value, self.file, str(excinfo.getrepr()))
            self._send(Result(self.running, "failed", self.seconds, self.title, failure=failure))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            failure = self.failure or Failure("CollectError", trace=report.longreprtext)
            self._send(Result(report.nodeid, "error", failure=failure))
            self.failure = None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        call = getattr(report, "call", None)
        if report.failed and call is not None:
            self.failure = self._failure(call.excinfo.value, None, report.longreprtext)
        return report

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
    ) -> None:
        if isinstance(node, pytest.Item) and call.excinfo is not None and self.failure is None:
            self.failure = self._failure(call.excinfo.value, node.path, report.longreprtext)

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> None:
        self.compared = (op, short(left), short(right))

    def _send(self, result: Result) -> None:
        self.emit({"event": "result", "result": asdict(result)})

    def _failure(self, error: BaseException, test: Path | None, trace: str) -> Failure:
        """Return the facts of an exception."""
        if isinstance(error.__cause__, SyntaxError) or isinstance(error, SyntaxError):
            syntax = error if isinstance(error, SyntaxError) else error.__cause__
            assert isinstance(syntax, SyntaxError)
            return self._syntax(syntax, trace)
        if test is None and error.__cause__ is not None:
            error = error.__cause__  # pytest wraps the exception of an import
        frames = list(frames_of(error))
        inside = [(path, line, name) for path, line, name in frames if self.tree in path.parents]
        own = [(path, line) for path, line, _ in inside if path == test]
        own = [frame for frame in own if not isinstance(statement_at(*frame), ast.Raise)] or own
        # The virtual environment may be inside the tree, and pytest's own frames with it.
        given = {"tests", "site-packages"}
        code = [frame for frame in inside if not given & {*frame[0].relative_to(self.tree).parts}]
        failure = Failure(
            kind=type(error).__name__,
            message=str(error),
            example="\n".join(getattr(error, "__notes__", ())),
            unwritten=tuple(dict.fromkeys(unwritten(error))),
            where=self._place(code[-1]) if code else None,
            calls=tuple(map(self._place, code[-MOST_CALLS:])),
            test_line=self._place(own[-1]) if own else None,
            trace=trace,
        )
        return self._told(failure, own[-1], inside[-1][:2] == own[-1]) if own else failure

    def _told(self, failure: Failure, place: tuple[Path, int], at_fault: bool) -> Failure:
        """Add what was called, returned and expected, from the statement of the test."""
        statement = statement_at(*place)
        if statement is None or isinstance(statement, ast.Raise):
            return failure
        if isinstance(statement, ast.With) and failure.message.startswith("DID NOT RAISE"):
            body = "\n".join(map(ast.unparse, statement.body))
            kind = re.sub(r"DID NOT RAISE|<class '|'>", "", failure.message).strip()
            return replace(
                failure, message="", called=cut(body), returned="no error", expected=kind
            )
        if not (isinstance(statement, ast.Assert) and at_fault):
            return replace(failure, called=cut(ast.unparse(statement).partition("\n")[0]))
        message, _, explanation = without_advice(failure.message).partition("assert ")
        failure = replace(
            failure,
            message=message.strip() if statement.msg is not None else "",
            explanation=f"assert {explanation}" if explanation else failure.message,
            called=cut(ast.unparse(statement.test)),
        )
        if self.compared is None or not isinstance(statement.test, ast.Compare):
            return failure
        op, returned, expected = self.compared
        if len(statement.test.ops) > 1:  # pytest does not say at which place of `a == 8 == b`
            return replace(failure, returned=f"{returned} {op} {expected}, which is false")
        called = called_by(statement.test.left, *place)
        expected = expected if op == "==" else f"{op} {expected}"
        return replace(failure, called=called and cut(called), returned=returned, expected=expected)

    def _syntax(self, error: SyntaxError, trace: str) -> Failure:
        place = self._place((Path(error.filename or ""), error.lineno or 0))
        source = with_caret(error)
        return Failure("SyntaxError", error.msg, where=place, source=source, trace=trace)

    def _place(self, frame: tuple[Any, ...]) -> str:
        """Return a path, a line and perhaps a function: "m1_single/engine.py:77 in step"."""
        path, line, *name = frame
        inside = path.relative_to(self.tree) if self.tree in path.parents else path
        return f"{inside}:{line}" + "".join(f" in {n}" for n in name)


def frames_of(error: BaseException) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and function of each frame, the outermost first."""
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        yield Path(code.co_filename), entry.tb_lineno, code.co_name
        entry = entry.tb_next


def unwritten(error: BaseException) -> Iterator[str]:
    """Yield the exercises of all `NotImplementedError`s in the chain of an exception."""
    seen: set[int] = set()  # the chain of an exception may be a cycle
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        found = UNWRITTEN.match(str(one))
        if isinstance(one, NotImplementedError) and found:
            yield found[1]
        todo += [*getattr(one, "exceptions", ()), one.__cause__, one.__context__]


def without_advice(message: str) -> str:
    """Remove pytest's advice on its own options from a message."""
    return re.sub(r"\n[ .]*(Use -v to get|Full output truncated).*", "", message)


def short(value: object) -> str:
    """Return the `repr` of a value, shortened if it is long. A `repr` that raises is named."""
    try:
        return cut(repr(value))
    except Exception as error:
        return f"<a {type(value).__name__}; its repr raises {type(error).__name__}>"


def cut(text: str) -> str:
    """Shorten a long text: leave its middle out."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"
