"""`ScaleSettings`: the settings of a server with several replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.validation import require_choice, require_float, require_int, require_text

from .policy import POLICIES

KV_TRANSFERS = ("shared-memory", "distributed")


@dataclass(frozen=True)
class ScaleSettings:
    """The settings of replicas. A wrong value raises `ValueError` that names the field and limit.

    replicas: the number of replicas, each with a model and a cache of its own. 0: one engine in the
        server's own process, without Ray.
    policy: how the router chooses a replica: the longest cached prefix, the lower load of two, or
        in turn.
    max_replicas: the maximum number of replicas. Ray adds and removes replicas between `replicas`
        and this number, by the number of open requests. None: the number is fixed.
    target_open_requests: the open requests of one replica at which Ray adds no other one.
    replica_cpus: the CPUs that Ray reserves for a replica. 0: replicas share the CPUs.
    replica_gpus: the GPUs that Ray reserves for a replica. With 0, it may see none.
    prefill: of the engine `disaggregated`: the number of its prefill processes. With `decode`.
    decode: the number of its decode sides, in place of `replicas`. Each of them has prefill
        processes of its own, and starts them again if they end.
    kv_transfer: how pages go from a prefill process to its decode side: through memory of both, or
        through torch.distributed (gloo; between GPUs NCCL, which is not tested).
    address: the cluster of Ray to join, such as 10.0.0.1:6379. None: a Ray on this machine only.
    dashboard: start Ray's dashboard, on 127.0.0.1.
    """

    replicas: int = 0
    policy: Literal["prefix", "least-load", "round-robin"] = "prefix"
    max_replicas: int | None = None
    target_open_requests: float = 8.0
    replica_cpus: float = 0.0
    replica_gpus: float = 0.0
    prefill: int = 0
    decode: int = 0
    kv_transfer: Literal["shared-memory", "distributed"] = "shared-memory"
    address: str | None = None
    dashboard: bool = False

    def __post_init__(self) -> None:
        require_int("replicas", self.replicas, low=0, high=4096)
        require_choice("policy", self.policy, POLICIES)
        require_int("max_replicas", self.max_replicas, low=max(1, self.num_replicas), optional=True)
        require_int("prefill", self.prefill, low=0, high=4096)
        require_int("decode", self.decode, low=0, high=4096)
        require_choice("kv_transfer", self.kv_transfer, KV_TRANSFERS)
        if self.decode and self.replicas:
            raise ValueError("decode is the number of replicas of both sides: leave out replicas")
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                f"prefill and decode need each other, got prefill={self.prefill} and "
                f"decode={self.decode}"
            )
        if self.decode and self.prefill % self.decode:
            raise ValueError(
                f"prefill must be a multiple of decode, because each decode side has prefill "
                f"processes of its own, got prefill={self.prefill} and decode={self.decode}"
            )
        require_float("target_open_requests", self.target_open_requests, low=0.01)
        require_float("replica_cpus", self.replica_cpus, low=0.0)
        require_float("replica_gpus", self.replica_gpus, low=0.0)
        if self.address is not None:
            require_text("address", self.address)

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas to begin with. 0: one engine in the server's process."""
        return self.replicas or self.decode
