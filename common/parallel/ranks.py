"""`Ranks`: the operations in which all ranks take part at the same time.

`Division` makes modules that use them: `Summed` and `Joined`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ..guard import EngineDeadError

LOOPBACK = "127.0.0.1"
# The longest time of one collective operation. A rank that has ended is noticed at once, because
# its connections close. The timeout is for a rank that hangs.
TIMEOUT = timedelta(seconds=30)


class RankError(EngineDeadError):
    """A rank has ended or has failed in a forward. The engine can compute no further step."""


@dataclass
class Ranks:
    """The process group, seen from one of its ranks."""

    group: Any  # a `ProcessGroupGloo` or `ProcessGroupNCCL`
    rank: int
    size: int
    # Whether the other ranks take part in the forward that this rank computes. If they do not, a
    # collective operation would wait for them until the timeout.
    is_shared: bool = True
    seconds: float = 0.0  # in collective operations; most of it is waiting for other ranks

    def add_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors `x`, which have the same shape. May overwrite `x`.

        This is an all-reduce. The result has the same bits on all ranks.
        """
        self._require_all()
        x = x.contiguous()
        self._finish(self.group.allreduce([x]))
        return x

    def join_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors `x` [..., n] one after the other: [..., size * n].

        This is an all-gather.
        """
        self._require_all()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._finish(self.group.allgather([parts], [x]))
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy the tensor `x` of rank 0 to that of each other rank."""
        self._finish(self.group.broadcast([x]))

    def _finish(self, operation: Any) -> None:
        started = time.perf_counter()
        operation.wait()
        self.seconds += time.perf_counter() - started

    def leave(self) -> None:
        """Close the connections to the other ranks. The operations in which they wait then fail."""
        self.group = None

    def _require_all(self) -> None:
        if not self.is_shared:
            raise RuntimeError(
                "a module of a divided model was called by itself: the other ranks take part only "
                "in a call of the whole model"
            )


class Divided(nn.Module):
    """A mixin for a module of which each rank computes a part."""

    ranks: Ranks


class Summed(Divided):
    """A mixin for a module. Its output is the sum of what the ranks compute."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the summand of this rank. Return the sum, on every rank."""
        return self.ranks.add_parts(super().forward(*args, **kwargs))


class Joined(Divided):
    """A mixin for a linear layer. Each rank computes a part of its outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in]. Return the outputs of all ranks, [..., out]."""
        return self.ranks.join_parts(super().forward(x))


def open_ranks(
    device: torch.device, rank: int, size: int, rendezvous: str, timeout: timedelta | None = None
) -> Ranks:
    """Return the process group of `size` ranks, after all of them have called this function.

    rendezvous: the path of a file in which the ranks find each other. It replaces a port on which
    rank 0 would listen. The connections between the ranks use 127.0.0.1 only. timeout: of one
    operation; `TIMEOUT` if it is None.
    """
    timeout = timeout or TIMEOUT
    store = dist.FileStore(rendezvous, size)
    group: Any
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        nccl: Any = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, nccl)
    else:
        kind: Any = dist.ProcessGroupGloo
        gloo = kind._Options()
        gloo._devices = [kind.create_device(hostname=LOOPBACK)]
        gloo._timeout = timeout
        group = kind(store, rank, size, gloo)
    return Ranks(group, rank, size)
