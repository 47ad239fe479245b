"""Run the server under uvicorn. SIGTERM and Ctrl-C drain it; a second one stops the process."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from common import LLMEngine

from .app import Api, create_app
from .connections import connection_class
from .errors import ApiError
from .limits import OpenRequests
from .settings import ServerSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE = 120  # seconds: longer than the connection pools of clients keep idle connections
POLL = 0.05  # seconds
CLOSING = 5  # seconds for the last bytes of answers


class DrainingServer(uvicorn.Server):
    """uvicorn, with a signal handler that drains before uvicorn stops.

    While it drains, new API calls and `/health` get status 503, and open requests go on. uvicorn
    itself would close the port first, and clients could not tell this from a crash.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        open_requests: OpenRequests,
        end_all: Callable[[ApiError], None],
        on_ready: Callable[[str], None],
    ) -> None:
        """Make a server. It drains `open_requests`, and `end_all` ends those that are left.

        `on_ready` is called with the URL when the server accepts connections.
        """
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop="asyncio",  # with the extra `scale`, others are installed too
                http=connection_class(settings),
                log_level="warning",
                lifespan="on",
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=CLOSING,
                backlog=settings.max_connections,
                server_header=False,
            )
        )
        self.settings = settings
        self.on_ready = on_ready
        self.open_requests = open_requests
        self.end_all = end_all
        self.draining: asyncio.Task[None] | None = None

    def serve_until_signal(self) -> int:
        """Serve until a signal arrives. Return the exit status."""
        try:
            self.run()
        except SystemExit as ended:  # uvicorn has said why: the port is in use, for example
            return int(ended.code or 0)
        return 0

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start, and keep the event loop for the signal handler."""
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_ready(self.address)

    @property
    def address(self) -> str:
        """Return the URL of the server after its start."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal. After a second one, end the process immediately."""
        if self.open_requests.is_draining:
            os._exit(128 + sig)
        self.open_requests.is_draining = True
        self.loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self.draining = self.loop.create_task(self.drain())

    async def drain(self) -> None:
        """Wait for the open requests. At the deadline, end them with an error. Then stop."""
        self.open_requests.is_draining = True
        deadline = time.monotonic() + self.settings.drain_timeout
        logger.warning("draining: %d requests are open", self.open_requests.count)
        while self.open_requests.count and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
        self.end_all(ApiError(503, "the server has shut down before the end of this answer"))
        self.should_exit = True


class Server(DrainingServer):
    """The server of one engine."""

    def __init__(
        self,
        engine: LLMEngine,
        settings: ServerSettings,
        on_ready: Callable[[str], None] = lambda address: None,
        beside: LLMEngine | None = None,
    ) -> None:
        """Make a server. `on_ready` is called with its URL when it accepts connections.

        beside: an engine with the same model, which only the live page shows.
        """
        app = create_app(engine, settings, beside)
        self.api: Api = app.state.api
        super().__init__(app, settings, self.api.open, self._end_all, on_ready)

    def _end_all(self, error: ApiError) -> None:
        self.api.engine.fail_all(error)
        self.api.live.close_pages()
