"""`LLMEngine`: the decode side of the elective `disaggregated`, with prefill processes.

All processes are on one machine. The decode side starts its prefill processes, and starts a new one
if one ends. So nothing has to be configured, and a prefill process never outlives its decode side.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any, Literal

from common import EngineConfig, EngineStats
from common.engine_core import EngineCoreOutput, ForwardError

from ...electives.disaggregated.counters import with_counters_of
from ...electives.disaggregated.engine import EngineCore
from ...electives.disaggregated.engine import LLMEngine as InProcess
from ...electives.disaggregated.kv_pool import affordable_pages
from ...electives.disaggregated.m5_model_runner import ModelRunner
from .metrics import TransferCollector
from .pages import share
from .peer import Peer, Setup
from .transport import ProcessTransport

KVTransfer = Literal["shared-memory", "distributed"]
WAIT_SECONDS = 0.005  # for pages, while there is nothing to compute
SETTLE_SECONDS = 0.2  # the longest wait for the last confirmations


class PrefillSide:
    """All prefill processes, as the core sees the other side."""

    def __init__(self, transport: ProcessTransport) -> None:
        self.transport = transport

    def finish_sends(self) -> None:
        self.transport.wait(WAIT_SECONDS)

    def reset_prefix_cache(self) -> None:
        self.transport.reset_prefix_cache()

    def check_invariants(self) -> None:
        self.transport.check_invariants()

    def close(self) -> None:
        self.transport.close()


class DecodeCore(EngineCore):
    """The decode side. Its prefill side is in other processes, so a step does not compute there."""

    transport: ProcessTransport
    prefill: Any  # `PrefillSide`

    def __init__(
        self, config: EngineConfig, runner: Any, num_prefill: int, kv_transfer: KVTransfer
    ) -> None:
        self.num_prefill, self.kv_transfer = num_prefill, kv_transfer
        super().__init__(config, runner)

    def open_transport(self) -> ProcessTransport:
        return ProcessTransport()

    def open_prefill_side(self) -> Any:
        """Start the prefill processes, and wait for them."""
        pool, is_shared = self.runner.kv_pool, self.kv_transfer == "shared-memory"
        setup = Setup(
            replace(self.config, num_pages=pool.num_pages, cuda_graph=False),
            pool,
            self.transport.windows,
            share(pool) if is_shared else None,
            max(1, (os.cpu_count() or 1) // (1 + self.num_prefill)),
            self.transport.wake,
        )
        on_gpu = pool.keys[0].device.type == "cuda"
        for number in range(self.num_prefill):
            device = f"cuda:{number + 1}" if on_gpu else self.config.device
            own = replace(setup, config=replace(setup.config, device=device))
            self.transport.peers.append(Peer(number, own))
        try:
            self._wait_until_ready()
        except BaseException:
            self.transport.close()
            raise
        return PrefillSide(self.transport)

    def _wait_until_ready(self) -> None:
        """Raises `RuntimeError` if a process ends before it is ready."""
        while not all(peer.is_ready for peer in self.transport.peers):
            self.transport.wait(0.1)
            self.poll()
            for peer in self.transport.peers:
                if peer.last_error:
                    raise RuntimeError(peer.last_error)

    def poll(self) -> None:
        """Notice prefill processes that have ended, and start new ones. A step does it, too."""
        self.transport.poll()

    def step(self) -> list[EngineCoreOutput]:
        """Take what has arrived since the last step, and run a step of this side."""
        outputs = self.receiver.receive()
        try:
            return outputs + super().step()
        except ForwardError as failure:
            failure.outputs = [*outputs, *failure.outputs]
            raise

    def run_prefill(self) -> None:
        """Raise what a prefill process has failed with. It computes by itself."""
        if self.transport.failures:
            failure, known = self.transport.failures.pop(0), self.receiver.requests
            requests = [known[attempt] for attempt in failure.attempts if attempt in known]
            if failure.is_blameless:
                raise ForwardError(requests, AssertionError(failure.error))
            if requests:  # otherwise all of them have ended meanwhile
                raise ForwardError(requests, RuntimeError(failure.error))

    def settle(self) -> None:
        """Wait a moment for the last confirmations. Later ones are taken with the next request."""
        end = time.monotonic() + SETTLE_SECONDS
        while self.scheduler.stand_ins and (rest := end - time.monotonic()) > 0:
            self.transport.wait(rest)
            self.receiver.receive()

    def stats(self) -> EngineStats:
        """Return the counters of both sides. Pages are those of the decode side."""
        mine = super(EngineCore, self).stats()
        return with_counters_of(mine, *(peer.report.stats for peer in self.transport.peers))


class LLMEngine(InProcess):
    """The engine of the elective. Only its decode side is in this process."""

    core: DecodeCore

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        num_prefill: int = 1,
        kv_transfer: KVTransfer = "shared-memory",
    ) -> None:
        """Start `num_prefill` processes.

        Raises `ValueError` on a GPU for shared memory, and `RuntimeError` if a process does not
        start. distributed: pages go through gloo, or on GPUs through NCCL (which is not tested).
        """
        self.num_prefill, self.kv_transfer = num_prefill, kv_transfer
        super().__init__(config)
        self.collectors = [TransferCollector(self.core.transport.peers)]

    def make_core(self) -> DecodeCore:
        model = self.loaded.model
        if model.device.type == "cuda" and self.kv_transfer == "shared-memory":
            raise ValueError(
                "kv_transfer=shared-memory needs a CPU: processes on GPUs share no memory. "
                "Set kv_transfer=distributed"
            )
        runner = open_runner(model, self.config, self.num_prefill)
        core = DecodeCore(self.config, runner, self.num_prefill, self.kv_transfer)
        core.now = self.now
        return core


def open_runner(model: Any, config: EngineConfig, num_prefill: int) -> ModelRunner:
    """Return the runner of the decode side. All processes have pools of one size.

    On a CPU, all pools are in one memory, and one pool by itself leaves room for one more only.
    """
    runner = ModelRunner(model, config)
    pool = runner.kv_pool
    if model.device.type == "cpu" and config.num_pages is None and num_prefill > 1:
        page_bytes = sum(tensor[:, 0].nbytes for tensor in (*pool.keys, *pool.values))
        num_pages = affordable_pages(config, page_bytes * (1 + num_prefill) // 2, model.device)
        if num_pages < pool.num_pages:
            runner.close()
            return ModelRunner(model, replace(config, num_pages=num_pages))
    return runner
