"""A rank other than rank 0. It makes the calls of the model that rank 0 sends, and nothing else.

It has no scheduler, no requests and no clock, and it samples no tokens. So all decisions are made
once, on rank 0, and the ranks cannot disagree about them.

`RankGroup` starts `python -m common.parallel.worker` with a socket. If rank 0 ends, in whatever
way, the system closes the socket, and this process ends too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..hf.model_loading import load_part
from ..hf.shared import attention_switched, on_device
from .calls import Receiver
from .division import Division
from .messages import Failed, Loaded, Ready, Start
from .ranks import Ranks, open_ranks


def main() -> None:
    """Be a rank. The first argument is the file descriptor of its socket."""
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # an orderly end of torch's threads would take a second


def serve(connection: Connection) -> None:
    """Be a rank until rank 0 closes the connection. An exception is sent to rank 0."""
    try:
        start: Start = connection.recv()
        sys.path[:] = start.sys_path
        torch.set_num_threads(start.num_threads)
        run(connection, start)
    except (EOFError, ConnectionError):
        pass  # rank 0 has closed the group, or has ended
    except BaseException as error:
        with contextlib.suppress(OSError):  # rank 0 has ended too: that may be the reason
            connection.send(Failed(repr(error), traceback.format_exc()))
    finally:
        connection.close()


def run(connection: Connection, start: Start) -> None:
    """Load the part of this rank, then make calls."""

    def join(division: Division, device: torch.device) -> Ranks:
        connection.send(Loaded())
        return open_ranks(device, start.rank, division.size, start.rendezvous)

    part = load_part(start.config, join)
    connection.send(Ready(part.changed, part.weight_bytes))
    receiver = Receiver(part.model.device)
    with on_device(part.model.device), torch.inference_mode():
        while True:
            step(connection, part.model, part.ranks, receiver)


def step(connection: Connection, model: Any, ranks: Ranks, receiver: Receiver) -> None:
    """Make one call of the model. Raises `EOFError` when rank 0 has closed the connection."""
    call = connection.recv()
    content = receiver.empty_content(call)
    ranks.broadcast(content)
    args, kwargs = receiver.unpack(call, content)
    with attention_switched(model, call.attention):
        model(*args, **kwargs)


if __name__ == "__main__":
    main()
