"""The limits of an exam: answers, the filter of system calls, a grader that is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from milestones.staff.grading import sandbox, system_calls
from milestones.staff.grading.answers import Questions, compare
from milestones.staff.grading.client import ForkServer, Outcome
from milestones.staff.grading.limits import Limits


def test_an_answer_that_is_nested_too_deeply_is_wrong() -> None:
    """Some can be read and not be written again."""
    questions = Questions(0, {5: [["a kind", "what?", 1]]})
    for depth in range(700, 1000):
        deep = "[" * depth + "]" * depth
        for answer, error in ((deep, "null"), ("1", deep)):
            text = f'[5, [["a kind", "what?", {answer}]], {error}]'
            assert compare(questions, [text], "no answer").share == 0


def refused(machine: system_calls.Machine, number: int, arguments: dict[int, int]) -> int:
    """Run the filter as the kernel does. Return its verdict on a system call."""
    memory = {system_calls.NUMBER: number, system_calls.ARCHITECTURE: machine.architecture}
    for place, value in arguments.items():
        memory[system_calls.FIRST_ARGUMENT + 8 * place] = value
    steps, at, value = system_calls.steps_for(machine), 0, 0
    while True:
        kind, if_true, if_false, operand = steps[at]
        at += 1
        if kind == system_calls.LOAD:
            value = memory.get(operand, 0)
        elif kind == system_calls.AND:
            value &= operand
        elif kind == system_calls.RETURN:
            return operand
        else:
            true = {
                system_calls.EQUAL: value == operand, system_calls.AT_LEAST: value >= operand,
                system_calls.HAS_BIT: bool(value & operand),
            }[kind]  # fmt: skip
            at += if_true if true else if_false


@pytest.mark.parametrize("machine", system_calls.MACHINES.values(), ids=system_calls.MACHINES)
def test_the_filter_on_each_machine(machine: system_calls.Machine) -> None:
    """Threads, forks and files in memory are allowed."""
    allowed = system_calls.ALLOW
    for number in (*machine.refused, *system_calls.NEW_CALLS):
        assert refused(machine, number, {}) == system_calls.REFUSE
    assert refused(machine, machine.clone, {0: 0x3D0F00}) == allowed, "a thread"
    assert refused(machine, machine.clone, {0: 0x1200011}) == allowed, "a fork"
    assert refused(machine, machine.clone, {0: 0x10000011}) == system_calls.REFUSE
    assert refused(machine, system_calls.CLONE3, {}) == system_calls.UNKNOWN
    for flags, verdict in ((0x22, allowed), (0x1, allowed), (0x21, system_calls.REFUSE)):
        assert refused(machine, machine.mmap, {3: flags}) == verdict
    assert refused(machine, 0, {}) == allowed
    other = system_calls.Machine(1, (), 0, 0)
    assert refused(other, 0, {}) == allowed


def test_when_the_server_is_stopped_no_thread_waits_for_an_exam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exam may be forked just when the server is killed, and go on without it."""
    kept: list[int] = []

    def fork_that_goes_on(_: object, __: object, fds: list[int]) -> None:
        kept.extend(map(os.dup, fds))

    outcomes: list[Outcome] = []
    with ForkServer(tmp_path, bare=True) as server, monkeypatch.context() as patch:
        patch.setattr(socket, "send_fds", fork_that_goes_on)
        patch.setattr(server, "_expect", lambda wanted: None)

        def examine() -> None:
            outcomes.append(server.examine(tmp_path, ["test.py::test"], Limits(), ()))

        thread = threading.Thread(target=examine, daemon=True)
        thread.start()
        while not kept:
            time.sleep(0.01)
        server.stop()
        thread.join(30)
    for fd in kept:
        os.close(fd)
    assert [outcome.broken for outcome in outcomes] == ["the exam ended before its last test"]


def test_an_exam_that_was_forked_too_late_ends() -> None:
    """Its parent has ended before the kernel was told to end it too."""
    alive, parent = os.pipe()
    os.close(parent)
    child = os.fork()
    if not child:
        sandbox.end_with_parent(alive)
        os._exit(0)
    os.close(alive)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
