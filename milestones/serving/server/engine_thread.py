"""`EngineThread`: the one thread that calls an engine.

    event loop      call(f)                                outputs of a box
                      |                                          ^
                      v                                          |
                   commands                               newest outputs, by request
                      |                                          ^
    engine thread     +--> f(engine) --> engine.step() ----------+      again and again

The engine has no lock: only this thread calls it, and commands run between two steps. Engines with
one model step in turns. A step never waits for a client. Its outputs replace older ones that the
event loop has not taken, so memory does not grow either.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from common import (
    EngineDeadError,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)

from .turns import Turns

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = tuple[Callable[[LLMEngine], Any], "Future[Any]"]


@dataclass(frozen=True)
class EngineRequest:
    """A request for the engine. Its id is used once: no other client can know or repeat it.

    arrival_time: when the API call arrived, in seconds of `time.perf_counter`. options: more
    arguments of `add_request`, for engines that have them.
    """

    request_id: str
    prompt: TokensPrompt
    params: SamplingParams | PoolingParams
    arrival_time: float
    options: Mapping[str, Any] = field(default_factory=dict)


class Observer:
    """Is told what happens, in the engine's thread. This one ignores it; the metrics do not."""

    def added(self, request: EngineRequest) -> None: ...
    def stepped(self, outputs: Sequence[RequestOutput]) -> None: ...


class OutputBox:
    """The outputs of the engine requests of one API call that its task has not taken yet.

    Outputs are cumulative, so a newer output replaces the older one of the same request. A box
    holds at most one output for each request, however slowly the client reads. All methods are for
    the event loop's thread.
    """

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.unfinished = set(request_ids)
        self.on_finished: Callable[[], None] = lambda: None  # even if nothing is read of the answer
        self._newest: dict[str, RequestOutput] = {}
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add an output. It replaces the one of the same request that waits here."""
        if output.finished:
            self.unfinished.discard(output.request_id)
            if not self.unfinished:
                self.on_finished()
        self._newest[output.request_id] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the task, if its requests have not all finished."""
        if self.unfinished:
            self._failure = error
            self._changed.set()

    async def outputs(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield new outputs as they come, until all requests have finished."""
        while self.unfinished or self._newest:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            newest, self._newest = self._newest, {}
            if newest:
                yield list(newest.values())


class EngineThread:
    """Steps an engine while it has work, and runs commands between two steps."""

    def __init__(self, engine: LLMEngine, turns: Turns, observer: Observer) -> None:
        self.failure: BaseException | None = None  # the exception that ended a step
        self._engine = engine
        self._turns = turns
        self._observer = observer
        self._commands: SimpleQueue[Command | None] = SimpleQueue()  # None: stop
        self._boxes: dict[str, OutputBox] = {}  # by request; only the event loop uses it
        self._lock = threading.Lock()  # guards `_newest`
        self._newest: dict[str, RequestOutput] = {}  # not yet delivered to their boxes
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Return whether the engine can still answer requests."""
        return self.failure is None and self._thread.is_alive()

    def dead(self) -> EngineDeadError:
        """Return the error for calls that the engine can no longer answer."""
        reason = "it was stopped" if self.failure is None else repr(self.failure)
        return EngineDeadError(f"the engine answers no more requests: {reason}")

    def start(self) -> None:
        """Start the thread. The running event loop is the one that gets the outputs."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()  # see `fail_all`
        self._thread.start()

    async def stop(self) -> None:
        """Close the engine and end the thread, after the step that is running."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Run `function(engine)` between two steps, and return or raise what it does."""
        future: Future[T] = Future()
        self._commands.put((function, future))
        return await asyncio.wrap_future(future)

    def post(self, function: Callable[[LLMEngine], Any]) -> None:
        """Run `function(engine)` between two steps, without waiting for it."""
        self._commands.put((function, Future()))

    async def open(self, requests: Sequence[EngineRequest]) -> OutputBox:
        """Add requests, all or none, and return the box of their outputs.

        Raises `ValueError` if the engine refuses one. The caller closes the box in any case.
        """
        box = OutputBox(request.request_id for request in requests)
        self._boxes |= dict.fromkeys(box.unfinished, box)

        def add(engine: LLMEngine) -> None:
            for request in requests:
                params: Any = request.params  # an engine without embeddings refuses PoolingParams
                engine.add_request(request.prompt, params, request.request_id, **request.options)
                self._observer.added(request)

        try:
            await self.call(add)
        except BaseException:  # refused, or the client is gone
            self.close(box)
            raise
        return box

    def close(self, box: OutputBox) -> None:
        """Abort the requests of a box that have not finished.

        Commands run in order, so the requests have been added when they are aborted.
        """
        ids = list(box.unfinished)
        for request_id in ids:
            self._boxes.pop(request_id, None)
        if ids:
            self.post(lambda engine: [engine.abort_request(i) for i in ids])
        box.unfinished.clear()

    def fail_all(self, error: Exception) -> None:
        """End all open API calls with this error. It is the exception of `ended` from now on."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # it may be that no call waits for it
        for box in set(self._boxes.values()):
            box.fail(error)

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self.failure is None:
                    self._step()
            if self._has_work():
                self._step()  # it returns the outputs of requests that were aborted at the end
        finally:
            with self._turns.turn():  # a forward may still be in flight
                self._engine.close()

    def _run_commands(self) -> bool:
        """Run the commands that wait. Without work for a step, wait for one. False: stop."""
        due = self._commands.qsize()  # later ones wait: a flood of commands must not stop the steps
        while due > 0 or not self._has_work():
            command = self._commands.get()
            due -= 1
            if command is None:
                return False
            self._execute(*command)
        return True

    def _has_work(self) -> bool:
        try:
            return self.failure is None and self._engine.has_unfinished_requests()
        except BaseException as error:
            self._fail(error)
            return False

    def _execute(self, function: Callable[[LLMEngine], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():  # its task was cancelled
            return
        try:
            if self.failure is not None:
                raise self.dead()
            future.set_result(function(self._engine))
        except BaseException as error:
            future.set_exception(error)

    def _step(self) -> None:
        try:
            with self._turns.turn(self._engine):
                outputs = self._engine.step()
            self._observer.stepped(outputs)
        except BaseException as error:
            self._fail(error)
            return
        with self._lock:
            is_first = not self._newest
            self._newest.update((output.request_id, output) for output in outputs)
        if is_first and outputs:  # otherwise, a delivery is due already
            self._loop.call_soon_threadsafe(self._deliver)

    def _fail(self, error: BaseException) -> None:
        """Make no more steps: the state of the engine is unknown. All open API calls end."""
        logger.error("the engine failed; the server answers no more requests", exc_info=error)
        self.failure = error
        self._loop.call_soon_threadsafe(self.fail_all, self.dead())

    def _deliver(self) -> None:
        """Move the newest outputs to their boxes. Requests of clients that are gone have none."""
        with self._lock:
            newest, self._newest = self._newest, {}
        for request_id, output in newest.items():
            if (box := self._boxes.get(request_id)) is not None:
                box.put(output)
                if output.finished:
                    del self._boxes[request_id]
