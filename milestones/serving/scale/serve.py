"""Run a front with its replicas, until a signal arrives."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from socket import socket
from typing import TYPE_CHECKING

from common import EngineConfig

from ...console import wide_console
from ..server.run import DrainingServer
from ..server.settings import ServerSettings
from .front import Front, PromptKeys
from .settings import ScaleSettings

if TYPE_CHECKING:
    from .ray_replicas import RayReplicas

logger = logging.getLogger(__name__)

WATCH_PERIOD = 1.0  # seconds
LOST_AFTER = 5  # attempts: a network may fail for a moment


def prepare(address: str | None) -> None:
    """Set what Ray reads from the environment when it is imported, for this process and its own.

    Ray sends no statistics about its use. A replica has the priority of this process; by default,
    Ray's workers give way to all other processes of the machine. Without an address, all processes
    of Ray listen on 127.0.0.1: by default they listen on all interfaces, on Linux also with the
    node address 127.0.0.1. The variable is meant for other systems, and its effect is the same.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


class FrontServer(DrainingServer):
    """The server of a front. SIGTERM and Ctrl-C drain it, as the server of one engine."""

    def __init__(
        self,
        replicas: RayReplicas,
        settings: ServerSettings,
        on_ready: Callable[[str], None] = lambda address: None,
    ) -> None:
        """Make a server. `on_ready` is called with its URL when it accepts connections."""
        described = asyncio.run(replicas.learn())
        self.control = replicas.control_address
        self.lost: str | None = None  # why the server had to end
        self.front = Front(replicas, settings, PromptKeys(described))
        super().__init__(self.front.app(), settings, self.front.open, self.front.end_all, on_ready)
        self.model = described.model

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start, and watch the process of Ray that controls the others."""
        await super().startup(sockets)
        if self.started:
            self.watching = self.loop.create_task(self.watch())

    async def watch(self) -> None:
        """Drain if Ray's control process is gone.

        Ray ends this process a minute later, without a word. Open answers can end before.
        """
        host, _, port = self.control.rpartition(":")
        failures = 0
        while failures < LOST_AFTER:
            await asyncio.sleep(WATCH_PERIOD)
            reached = await listens(host.strip("[]"), int(port))  # [::1] is an address of IPv6
            failures = 0 if reached else failures + 1
        self.lost = (
            f"Ray's control process (GCS) at {self.control} has ended. Without it, no replica can "
            "be replaced, and Ray ends this server within a minute. Start the server again"
        )
        logger.error("%s. Open requests get %g s", self.lost, self.settings.drain_timeout)
        await self.drain()


def run_replicas(
    milestone: str, config: EngineConfig, settings: ServerSettings, scale: ScaleSettings
) -> int:
    """Start the replicas and serve until a signal arrives. Return the exit status."""
    prepare(scale.address)
    from .ray_replicas import started_replicas

    console = wide_console()

    def ready(address: str) -> None:
        count = f"{scale.num_replicas} replicas of {milestone}"
        if scale.decode:
            count = f"{scale.decode} decode and {scale.prefill} prefill processes of {milestone}"
        console.print(f"{count} serve {server.model} at {address}/v1 (Ctrl-C drains and stops)")
        console.print(f"what the router knows: {address}/replicas")
        sys.stdout.flush()

    with started_replicas(milestone, config, settings, scale) as replicas:
        server = FrontServer(replicas, settings, ready)
        status = server.serve_until_signal()
        if server.lost is not None:
            console.print(server.lost, style="red")
            sys.stdout.flush()
            os._exit(1)  # Ray would wait a minute for the process that has ended
        return status


async def listens(host: str, port: int) -> bool:
    """Return whether a process accepts connections there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), WATCH_PERIOD)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
