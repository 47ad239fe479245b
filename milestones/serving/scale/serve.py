"""Run a front with its replicas, until a signal arrives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import EngineConfig

from ...console import wide_console
from ..server.run import DrainingServer
from ..server.settings import ServerSettings
from .environment import prepare
from .front import Front
from .prompt_keys import PromptKeys
from .settings import ScaleSettings

if TYPE_CHECKING:
    from .ray_replicas import RayReplicas


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
        self.front = Front(replicas, settings, PromptKeys(described))
        super().__init__(self.front.app(), settings, self.front.open, self.front.end_all, on_ready)
        self.model = described.model


def run_replicas(
    milestone: str, config: EngineConfig, settings: ServerSettings, scale: ScaleSettings
) -> int:
    """Start the replicas and serve until a signal arrives. Return the exit status."""
    prepare(scale.address)
    from .ray_replicas import started_replicas

    console = wide_console()

    def ready(address: str) -> None:
        count = f"{scale.replicas} replicas of {milestone}"
        console.print(f"{count} serve {server.model} at {address}/v1 (Ctrl-C drains and stops)")
        console.print(f"what the router knows: {address}/replicas")
        sys.stdout.flush()

    with started_replicas(milestone, config, settings, scale) as replicas:
        server = FrontServer(replicas, settings, ready)
        try:
            server.run()
        except SystemExit as ended:  # uvicorn has said why: the port is in use, for example
            return int(ended.code or 0)
    return 0
