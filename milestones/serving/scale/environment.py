"""What must be set before Ray starts, so that it listens on this machine only."""

from __future__ import annotations

import os
from typing import Any


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


def listen_on_this_machine_only() -> None:
    """Let the process of a replica listen on 127.0.0.1, before Ray Serve opens its port there.

    Ray Serve 2.60 opens a port for calls between deployments on all interfaces of the machine. No
    option changes this, and no call of this project uses the port.
    """
    from ray.serve._private import replica

    original = replica.add_port_to_grpc_server

    def add_port(server: Any, address: str) -> Any:
        return original(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = add_port
