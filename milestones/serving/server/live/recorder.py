"""`Watched`: an engine that pages watch; `Recorder`: one recording of it for all of them.

    engine thread   step --> LiveTrace: the newest steps       join and leave: between two steps
                                 ^
    event loop                 pages

Each page reads the steps that it does not have yet, at its own speed. Without a page, nothing is
recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from common import LLMEngine
from common.displays.demo import machine
from common.tracing.data import TraceData
from common.tracing.live import LiveTrace

from ..engine_thread import EngineThread


class Recorder:
    """Opens the trace when the first page joins, and closes it when the last one leaves."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._pages: set[str] = set()  # only the engine's thread uses it
        self._trace: LiveTrace | None = None

    @property
    def is_recording(self) -> bool:
        return self._trace is not None

    async def join(self, page: str) -> TraceData:
        """Add a page, or let it begin again. Return the current state; `since` continues it."""
        try:
            return await self._engine.call(lambda engine: self._join(engine, page))
        except BaseException:  # the engine is dead, or the page is gone
            self.leave(page)
            raise

    def leave(self, page: str) -> None:
        """Remove a page."""
        self._engine.post(lambda engine: self._leave(page))

    def since(self, step: int) -> TraceData | None:
        """Return the steps after `step`; None if a page that is so far behind must join again."""
        trace = self._trace
        return None if trace is None else trace.since(step)

    def end(self) -> None:
        """Close the trace, even if a page is open. The engine's thread must have ended."""
        self._pages.clear()
        self._close()

    def _join(self, engine: LLMEngine, page: str) -> TraceData:
        if self._trace is None:
            trace = LiveTrace(engine)
            trace.data.meta["machine"] = machine()
            self._trace = trace.__enter__()
        self._pages.add(page)
        return self._trace.snapshot()

    def _leave(self, page: str) -> None:
        self._pages.discard(page)
        if not self._pages:
            self._close()

    def _close(self) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None


@dataclass(frozen=True)
class Watched:
    """An engine that pages watch. is_small: its memory has few pages."""

    engine: EngineThread
    recorder: Recorder
    is_small: bool = False

    async def close(self) -> None:
        """End the recording and the engine, and free the memory of both."""
        await self.engine.stop()
        self.recorder.end()
