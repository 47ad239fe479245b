"""structured_output.1: a request waits for its own grammar, and for nothing else."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from common import Request
from milestones.electives.structured_output import grammar_manager
from milestones.electives.structured_output.grammar_manager import GrammarManager
from tests.exercises.by_hand import make_request
from tests.helpers.fake_grammars import FakeCompiler, allowed_tokens, structured
from tests.helpers.oracle import greedy


class WatchedFuture(Future[Any]):
    """A future that refuses to be waited for."""

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), "I5: all requests would wait until this grammar is compiled"
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        assert self.done(), "I5: all requests would wait until this grammar is compiled"
        return super().exception(timeout)


class Compiler(FakeCompiler):
    """A `FakeCompiler` with futures that refuse to be waited for, one for equal parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Any, Future[Any]] = {}

    def submit(self, wanted: Any) -> Future[Any]:
        if wanted not in self.known:
            super().submit(wanted)
            future, text = self.pending.pop()
            self.known[wanted] = future = WatchedFuture()
            self.pending.append((future, text))
        return self.known[wanted]


def make_manager() -> tuple[Any, Compiler]:
    compiler = Compiler()
    return GrammarManager(compiler, num_words=9), compiler  # type: ignore[arg-type]


def added(manager: Any, name: str, salt: int = 0) -> Request:
    request = make_request(name, [1, 2])
    request.params = greedy(8, structured_outputs=structured(salt, 3))
    manager.add_request(request)
    return request


def taken(manager: Any) -> list[tuple[str, str | None]]:
    return [(request.request_id, reason) for request, reason in manager.take_compiled()]


def test_a_request_waits_until_its_grammar_is_compiled() -> None:
    manager, compiler = make_manager()
    request = added(manager, "a")
    assert taken(manager) == [], "its grammar is not compiled yet"
    assert request in manager.queue, "I3: a live request is in a queue"
    compiler.finish()
    assert taken(manager) == [("a", None)], "its grammar is compiled"
    assert request not in manager.queue and request in manager.grammars, "I3: in one place only"
    assert taken(manager) == [], "a request leaves the queue once"


def test_a_slow_grammar_holds_up_no_other() -> None:
    """I5: requests leave as their grammars are compiled, and the oldest comes first."""
    manager, compiler = make_manager()
    for number, name in enumerate("abc"):
        added(manager, name, number)
    compiler.finish(2)
    compiler.finish(1)
    assert taken(manager) == [("b", None), ("c", None)], "a is not compiled, b and c are"
    compiler.finish()
    assert taken(manager) == [("a", None)]


def test_a_step_blocks_for_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError(
            "I5: take_compiled waits for a grammar that is not compiled: all requests would wait"
        )

    monkeypatch.setattr(grammar_manager, "wait", refuse)
    manager, _compiler = make_manager()
    added(manager, "a")
    assert taken(manager) == [], "its grammar is not compiled yet"


def test_a_bad_grammar_ends_only_its_request() -> None:
    """I4: the reason is that of the compiler."""
    manager, compiler = make_manager()
    for number, name in enumerate("abc"):
        added(manager, name, number)
    compiler.finish(1, ValueError("unknown keyword 'not'"))
    compiler.finish(0)
    compiler.finish(0)
    found = taken(manager)
    expected = [("a", None), ("b", "unknown keyword 'not'"), ("c", None)]
    assert found == expected, "b ends, and the others do not notice"
    names = [request.request_id for request in manager.grammars]
    assert names == ["a", "c"], "I3: a request that ends holds no grammar"


def test_each_request_has_a_place_of_its_own() -> None:
    """I2: two requests share what is compiled, and one does not move the other."""
    manager, compiler = make_manager()
    first, second = added(manager, "a", 7), added(manager, "b", 7)
    compiler.finish()
    assert len(taken(manager)) == 2
    grammars = manager.grammars
    assert grammars[first] is not grammars[second], "I2: they move independently"
    assert grammars[first].accept(allowed_tokens(7, [], 3)[0])
    assert grammars[second].accepted == [], "I2: the other request is at the beginning"
    third = added(manager, "c", 7)
    assert len(taken(manager)) == 1, "the grammar is compiled already"
    assert grammars[third].accepted == [], "I2: a later request begins at the beginning"


def test_a_request_waits_no_longer_than_the_timeout() -> None:
    manager, compiler = make_manager()
    patient = added(manager, "patient", 1)
    manager.timeout = 0.0
    request = added(manager, "late", 2)
    found = taken(manager)
    assert [name for name, _ in found] == ["late"], f"each has its own deadline: {found}"
    assert "0 s" in str(found[0][1]), f"the reason names the limit: {found[0][1]}"
    assert request not in manager.queue and request not in manager.grammars, "I3: it ends"
    future = compiler.known[request.params.structured_outputs]
    assert compiler.abandoned == [future], "the compiler would compile what no request waits for"
    compiler.finish(1)
    assert taken(manager) == [], "a result that comes too late changes nothing"
    assert patient in manager.queue


def test_a_compiled_grammar_is_never_too_late() -> None:
    manager, compiler = make_manager()
    manager.timeout = 0.0
    added(manager, "a")
    compiler.finish()
    assert taken(manager) == [("a", None)], "there is nothing to wait for"
    assert compiler.abandoned == [], "its grammar is used"
