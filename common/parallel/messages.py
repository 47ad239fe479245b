"""What rank 0 and another rank say to each other through their socket, in this order.

    rank 0                              rank r
    Start ----------------------------> reads the model, and cuts it
          <---------------------------- Loaded
    both open the process group, and apply the passes
          <---------------------------- Ready
    Call, and a broadcast of integers -> makes the call           again and again
    closes the socket ----------------> ends

A rank that fails sends `Failed`, and ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import EngineConfig


@dataclass(frozen=True)
class Start:
    """The first message to a rank."""

    config: EngineConfig
    rank: int
    rendezvous: str  # see `open_ranks`
    sys_path: list[str]
    num_threads: int  # of torch


@dataclass(frozen=True)
class Loaded:
    """The rank has its part of the model. It can open the process group."""


@dataclass(frozen=True)
class Ready:
    """The rank waits for calls."""

    changed: dict[str, int]  # how many modules each pass changed
    weight_bytes: int  # of its part of the model


@dataclass(frozen=True)
class Failed:
    """The rank ends, because of an exception."""

    cause: str  # type and message of the exception
    traceback: str
