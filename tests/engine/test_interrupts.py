"""Ctrl-C or a timer may interrupt at any moment: no answer is wrong, and no request is lost."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from common import EngineDeadError, LoadedModel, guard, llm_engine
from common.guard import HeldInterrupts, interrupts_held
from milestones.lab.instruments.audit import sides
from milestones.lab.instruments.hash_model import expected_tokens, hash_model
from milestones.lab.instruments.streams import EarlyStream
from tests.conftest import MILESTONES, ROOT, EngineFactory, assert_idle, build_engine
from tests.engine.test_failures import model_with
from tests.helpers.oracle import completions, drain, greedy

# An interrupt may hit a callback of the garbage collector. Python then only reports its exception.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PROMPTS = [[7], [1, 2, 3], list(range(20)), [9, 8], [7] * 18, [1, 2, 4]]


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """`interrupt_at(n)` raises a signal at the n-th function call from now in the main thread.

    If that call is outside the engine, the signal comes with the next call inside the engine. The
    handler raises `Interrupted`. A profile hook counts the calls, so the moment is the same in each
    run and does not depend on a clock. The interpreter crashes if this hook is used while forwards
    run in a thread of their own. Tests therefore use a stream without a thread here, and a test
    with a timer covers the stream with a thread.
    """
    calls = [0]

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGUSR1, handler)

    def arm(nth: int) -> None:
        calls[0] = nth

        def count(frame: FrameType, event: str, arg: Any) -> None:
            calls[0] -= event == "call"
            if calls[0] <= 0 and event == "call" and is_in_engine(frame):
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR1)

        sys.setprofile(count)

    yield arm
    sys.setprofile(None)
    signal.signal(signal.SIGUSR1, previous)


def engine_in_one_thread(milestone: str, model: LoadedModel | None = None, **config: Any) -> Any:
    """Return an engine on the hash model. Its forwards run in the main thread."""
    engine: Any = build_engine(milestone, model or hash_model(), **config)
    for runner in [side.runner for side in sides(engine)]:
        for name in {"stream", "send_stream"} & vars(runner).keys():
            getattr(runner, name).close()
            setattr(runner, name, EarlyStream())
    return engine


def is_in_engine(frame: FrameType | None) -> bool:
    """Return whether a call of an engine is running, but not the report of a lost exception."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("unraisableexception.py"):
            return False
        if frame.f_code.co_filename in (guard.__file__, llm_engine.__file__):
            return True
        frame = frame.f_back
    return False


def finals_of(engine: Any, on_interrupt: Callable[[], None]) -> dict[str, list[int]]:
    """Step until all requests have ended. Return the tokens of each request's one final output."""
    finals: dict[str, list[int]] = {}
    while True:
        try:
            if not engine.has_unfinished_requests():
                return finals
            outputs = engine.step()
        except Interrupted:
            on_interrupt()
            continue
        for output in outputs:
            if output.finished:
                assert output.request_id not in finals, "I3: a request has two final outputs"
                finals[output.request_id] = output.outputs[0].token_ids


@pytest.mark.parametrize("first", range(1, 400, 19))
def test_a_step_interrupted_anywhere(
    milestone: str, interrupt_at: Callable[[int], None], first: int
) -> None:
    """The interrupts come again and again, each some calls later, in all steps of a run."""
    engine = engine_in_one_thread(milestone, max_num_seqs=3, num_pages=12, page_size=4)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(5, ignore_eos=True), f"{i}")
    interrupts = [0]

    def again() -> None:
        engine.check_invariants()
        interrupts[0] += 1
        interrupt_at(first + 7 * interrupts[0])

    interrupt_at(first)
    finals = finals_of(engine, again)
    sys.setprofile(None)
    assert interrupts[0] > 0, "no interrupt came: this test proves nothing"
    assert finals == {f"{i}": expected_tokens(p, 5) for i, p in enumerate(PROMPTS)}
    assert_idle(engine)


@pytest.mark.parametrize("call", ["add_request", "abort_request", "stream"])
def test_other_calls_interrupted_anywhere(
    milestone: str, interrupt_at: Callable[[int], None], call: str
) -> None:
    engine = engine_in_one_thread(milestone, max_num_seqs=2)
    was_interrupted = False
    for nth in range(1, 60):
        engine.add_request([1, 2, 3], greedy(4, ignore_eos=True), "kept")
        engine.add_request([4, 5], greedy(4, ignore_eos=True), "aborted")
        engine.step()
        live = set(engine.output_processor.requests)
        interrupt_at(nth)
        try:
            if call == "abort_request":
                engine.abort_request("aborted")
            else:
                getattr(engine, call)([6], greedy(3, ignore_eos=True))
        except Interrupted:
            was_interrupted = True
            engine.check_invariants()
            if call != "abort_request":
                assert set(engine.output_processor.requests) == live, "I3: a request was left over"
        finally:
            sys.setprofile(None)
        outputs = {name: all_of[-1] for name, all_of in drain(engine).items()}
        assert outputs["kept"].outputs[0].token_ids == expected_tokens([1, 2, 3], 4)
        assert outputs["aborted"].finished
        assert_idle(engine)
    assert was_interrupted


@pytest.mark.parametrize("first", range(1, 700, 31))
def test_generate_interrupted_anywhere(
    milestone: str, interrupt_at: Callable[[int], None], first: int
) -> None:
    """No request of an interrupted `generate` is left, and another request goes on."""
    engine = engine_in_one_thread(milestone, max_num_seqs=3)
    engine.add_request([4, 5, 6], greedy(9, ignore_eos=True), "bystander")
    interrupt_at(first)
    try:
        engine.generate(PROMPTS, greedy(5, ignore_eos=True))
    except Interrupted:
        engine.check_invariants()
        assert set(engine.output_processor.requests) <= {"bystander"}
        assert set(engine.output_processor.outbox) <= {"bystander"}
    finally:
        sys.setprofile(None)
    finals = drain(engine)
    assert finals["bystander"][-1].outputs[0].token_ids == expected_tokens([4, 5, 6], 9)
    output = engine.generate([[5, 6]], greedy(3, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == expected_tokens([5, 6], 3), "a later call is wrong"
    assert_idle(engine)


def test_a_timer_interrupts_at_random_moments(milestone: str) -> None:
    interrupts = [0]

    def handler(signum: int, frame: FrameType | None) -> None:
        if is_in_engine(frame):  # an interrupt in the code of this test would end the test
            interrupts[0] += 1
            raise Interrupted

    engine: Any = build_engine(milestone, hash_model(), max_num_seqs=3)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(200):  # on a busy machine, few of the signals arrive in the engine
            if number >= 20 and interrupts[0] > 10:
                break
            round_ = number % 20
            prompts = [[*prompt, round_] for prompt in PROMPTS]
            for i, prompt in enumerate(prompts):
                engine.add_request(prompt, greedy(5, ignore_eos=True), f"{i}")
            signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.0001 * round_, 0.0013)
            finals = finals_of(engine, lambda: None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert finals == {f"{i}": expected_tokens(p, 5) for i, p in enumerate(prompts)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupts[0] > 10
    assert_idle(engine)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 checks for signals after every call")
def test_a_signal_at_the_very_end_reaches_the_caller(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives when handlers are restored is handled when the caller has the result.

    The signal is sent when the last function of the guard frees its variables, from C, so that
    Python does not look for signals before it looks for them by itself.
    """
    engine: Any = make_engine()
    kill = functools.partial(ctypes.CDLL(None).kill, os.getpid(), int(signal.SIGUSR1))
    sender = type("Sender", (), {"__del__": staticmethod(kill)})

    def interrupted(*_: Any) -> None:
        raise Interrupted

    def end_with_a_signal(held: HeldInterrupts, *_: Any) -> None:
        leave(held)
        _sent_when_freed = sender()

    leave, previous = HeldInterrupts.__exit__, signal.signal(signal.SIGUSR1, interrupted)
    name = None
    try:
        with monkeypatch.context() as patch:
            patch.setattr(HeldInterrupts, "__exit__", end_with_a_signal)
            with pytest.raises(Interrupted):
                name = engine.add_request([1, 2, 3], greedy(4))
                sorted([])  # the first call after the result was taken
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert name is not None, "the call was interrupted, and its request stays in the engine"


def test_a_second_ctrl_c_ends_the_engine(milestone: str) -> None:
    """A second Ctrl-C stops a forward that does not return. The engine then refuses to go on."""
    presses: list[int] = []

    def press(*_: Any, **__: Any) -> None:
        if len(presses) < 2 and armed:
            presses.append(1)
            signal.raise_signal(signal.SIGINT)
            presses.append(1)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second Ctrl-C was held back")

    armed = False
    engine = engine_in_one_thread(milestone, model_with(press))
    engine.add_request([1, 2], greedy(3))
    armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(presses) == 2
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()
    engine.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_are_held_and_delivered_in_order() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[[int, FrameType | None], None]:
        def handler(signum: int, frame: FrameType | None) -> None:
            seen.append(name)
            raise Interrupted(name)

        return handler

    handlers = {signal.SIGUSR1: note("one"), signal.SIGUSR2: note("two")}
    previous = {signum: signal.signal(signum, h) for signum, h in handlers.items()}
    try:
        with pytest.raises(Interrupted, match="two") as caught, interrupts_held():
            with interrupts_held():
                signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert seen == [], "a signal must be held back until the end of the outer block"
        assert seen == ["one", "two"], "the exception of the first handler lost the second signal"
        assert str(caught.value.__context__) == "one"
        assert {s: signal.getsignal(s) for s in handlers} == handlers, "a handler is not restored"
        with pytest.raises(Interrupted, match="two"):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def test_a_caller_can_choose_the_moment() -> None:
    previous = signal.getsignal(signal.SIGINT)
    with interrupts_held() as held:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.deliver()
    assert signal.getsignal(signal.SIGINT) is previous


def test_calls_of_another_thread_are_refused(make_engine: EngineFactory) -> None:
    """Each public call is refused with a message that has the rule. No answer changes."""
    engine: Any = make_engine(hash_model(), max_num_seqs=2)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(5, ignore_eos=True), f"{i}")
    engine.step()
    calls: list[Callable[[], Any]] = [
        engine.step, engine.stats, engine.check_invariants, engine.close,
        engine.has_unfinished_requests, engine.reset_prefix_cache,
        lambda: engine.abort_request("0"), lambda: engine.add_request([1]),
        lambda: engine.generate([[1]]), lambda: engine.stream([1]),
    ]  # fmt: skip
    messages: list[str] = []

    def attack() -> None:
        for call in calls:
            with pytest.raises(RuntimeError) as caught:
                call()
            messages.append(str(caught.value))

    thread = threading.Thread(target=attack)
    thread.start()
    thread.join()
    assert len(messages) == len(calls)
    assert all("One thread makes all calls" in message for message in messages)
    finals = {name: found.token_ids for name, found in completions(engine).items()}
    assert finals == {f"{i}": expected_tokens(p, 5) for i, p in enumerate(PROMPTS)}


def test_an_engine_can_be_made_in_one_thread_and_run_in_another(milestone: str) -> None:
    """Once that thread has ended, another thread may use the engine."""
    engine: Any = build_engine(milestone, hash_model())
    answers: list[Any] = []

    def serve() -> None:
        answers.append(engine.generate([[1, 2]], greedy(3, ignore_eos=True))[0])

    for _ in range(2):
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert [a.outputs[0].token_ids for a in answers] == [expected_tokens([1, 2], 3)] * 2
    engine.close()


FORK = """
import os
from tests.conftest import MILESTONES, build_engine
from milestones.lab.instruments.hash_model import hash_model
from tests.helpers.oracle import greedy
for milestone in MILESTONES:
    engine = build_engine(milestone, hash_model())
    engine.generate([[1, 2]], greedy(3))
    if os.fork() == 0:
        try:
            engine.generate([[1, 2]], greedy(3))
        except RuntimeError as error:
            print(milestone, error, flush=True)
        os._exit(0)
    os.wait()
    engine.generate([[1, 2]], greedy(3))
    print(milestone, "goes on", flush=True)
"""


def test_a_forked_child_is_refused() -> None:
    """A forked child has no forward thread, and would wait for its results for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    for milestone in MILESTONES:
        assert f"{milestone} generate: the engine was made in process" in done.stdout, done.stderr
        assert f"{milestone} goes on" in done.stdout, done.stderr


@pytest.mark.before("multi_step")  # one plan has more steps than these requests
@pytest.mark.parametrize("where", ["in a step", "in another thread"])
def test_a_stream_may_be_dropped_at_any_moment(milestone: str, where: str) -> None:
    """The garbage collector may drop it during a step, which must not lose its requests."""
    dropped: list[Any] = []

    def collect(*_: Any, **__: Any) -> None:
        if where == "in a step":
            dropped.clear()  # the last reference to the stream

    engine: Any = build_engine(milestone, model_with(collect))
    engine.add_request([4, 5, 6], greedy(9, ignore_eos=True), "kept")
    stream = engine.stream([1, 2, 3], greedy(9, ignore_eos=True))
    next(stream)
    dropped.append(stream)
    del stream
    if where == "in another thread":
        thread = threading.Thread(target=dropped.clear)
        thread.start()
        thread.join()
    outputs = drain(engine)
    assert not dropped
    (kept,) = (o.outputs[0] for all_of in outputs.values() for o in all_of if o.finished)
    assert kept.token_ids == expected_tokens([4, 5, 6], 9)
    others = [o for name, all_of in outputs.items() if name != "kept" for o in all_of]
    assert len(others) <= 2, "I3: the request goes on after the steps that were in flight"
    assert_idle(engine)
