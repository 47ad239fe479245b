"""Two machines and a link in virtual time: a clock for each side, and the bytes of a large model.

Each side has a host and a device of its own. A message arrives at the time at which it was sent, so
a side that is behind sees it later. The pages of tiny models would take no time. Here a token has
the bytes of a model of 8 billion parameters (Llama 3.1: 32 layers, 8 KV heads of 128, 2 bytes), and
each layer of the tiny model stands for several of its layers, which are sent one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from common.clock import VirtualClock
from common.virtual_time import charge_steps, wrap

from .engine import LLMEngine

NUM_LAYERS = 32
TOKEN_BYTES = 2 * NUM_LAYERS * 8 * 128 * 2
GIGABYTES_PER_SECOND = 25.0  # a network card of 200 Gbit/s


class Link:
    """What the sends of the prefill side take."""

    def __init__(self, core: Any, clock: VirtualClock) -> None:
        """clock: of the prefill side."""
        self.clock = clock
        self.runner = core.prefill.runner
        self.num_layers = len(self.runner.kv_pool.keys)
        self.page_bytes = TOKEN_BYTES * core.config.page_size
        self.page_seconds = self.page_bytes / GIGABYTES_PER_SECOND / 1e9
        self.forward_seconds = 0.0  # of the step that is computed
        self.begins: dict[tuple[int, int, int], float] = {}  # by attempt, first page and layer
        self.steps: list[tuple[Any, Any]] = []  # the events of forwards, and of their sends

    def add_costs(self) -> None:
        """Let sends take time. A layer is ready after its share of the forward."""
        wrap(self.runner, "compute", self._compute)
        wrap(self.runner, "send_layer", self._send_layer)
        wrap(self.runner, "copy", self._copy)
        wrap(self.runner, "settle", self._settle)

    @property
    def num_bytes(self) -> int:
        return self.runner.num_pages_sent * self.page_bytes

    @property
    def seconds(self) -> float:
        """The time in which the link was busy."""
        return self.runner.num_pages_sent * self.page_seconds

    @property
    def exposed_seconds(self) -> float:
        """The time in which a step was computed, and its pages were still being sent."""
        return sum(max(0.0, sent.work.end - done.work.end) for done, sent in self.steps)

    @property
    def busy_seconds(self) -> float:
        """The time in which the device of the prefill side computed."""
        return sum(end - begin for begin, end in self.runner.stream.spans)

    def _compute(self, original: Callable[..., Any], step: Any) -> Any:
        self.forward_seconds = self.clock.costs.forward_seconds(step.inputs.input_ids.numel())
        return original(step)

    def _send_layer(self, original: Callable[..., None], layer: int) -> None:
        """Note when a layer is ready. A layer that the forward stored unseen is sent after it."""
        work = self.clock.work
        assert work is not None, "layers are stored by the device"
        ready = work.end
        if work.num_forwards == 0:  # its time is charged when the forward ends
            ready += (layer + 1) / self.num_layers * self.forward_seconds
        num_pages = sum(len(send.sources) for send in self.runner.sends)
        seconds = num_pages * self.page_seconds / self.num_layers
        # The first of the large model's layers can be sent when it is ready.
        early = min(seconds, self.forward_seconds / self.num_layers)
        begin = ready - (1 - self.num_layers / NUM_LAYERS) * early
        for send in self.runner.sends:
            self.begins[send.attempt, send.first, layer] = begin
        original(layer)

    def _copy(self, original: Callable[..., None], layer: int, send: Any) -> None:
        original(layer, send)
        self.clock.wait_until(self.begins.pop((send.attempt, send.first, layer)))
        self.clock.charge(len(send.sources) * self.page_seconds / self.num_layers)

    def _settle(self, original: Callable[..., Any], result: Any) -> Any:
        sent = original(result)
        if sent is not None and (not self.steps or sent is not self.steps[-1][1]):
            self.steps.append((result.done, sent))
        return sent


class TimedMessages:
    """Messages with the time at which they were sent."""

    def __init__(self, core: Any, clocks: dict[str, VirtualClock]) -> None:
        self.clocks = clocks
        self.mailboxes = core.transport.mailboxes
        self.times: dict[str, deque[float]] = {side: deque() for side in clocks}
        wrap(core.transport, "send", self._send)
        wrap(core.transport, "receive", self._receive)

    def _send(self, original: Callable[..., None], side: str, message: Any) -> None:
        sender = "prefill" if side == "decode" else "decode"
        self.times[side].append(self.clocks[sender].now())
        original(side, message)

    def _receive(self, _: Callable[..., Any], side: str) -> list[Any]:
        """Return the messages that were sent before the receiver's time."""
        times, now, messages = self.times[side], self.clocks[side].now(), []
        while times and times[0] <= now:
            times.popleft()
            messages.append(self.mailboxes[side].popleft())
        return messages


def add_costs(engine: LLMEngine, clock: VirtualClock) -> str:
    """Give the prefill side a clock, and the link its time. Return the link in words."""
    core, own = engine.core, VirtualClock(clock.costs)
    charge_steps(core.prefill, own)
    core.prefill.now = own.now
    link = core.prefill.runner.link = Link(core, own)  # type: ignore[attr-defined]
    link.add_costs()
    messages = TimedMessages(core, {"decode": clock, "prefill": own})

    def run_prefill(original: Callable[[], None]) -> None:
        """Let the prefill side work until it is not behind the decode side."""
        while own.host_time <= clock.host_time:
            if not core.prefill.has_work:
                own.host_time = clock.host_time
            original()
            if not core.prefill.has_work:
                break

    def step(original: Callable[[], Any]) -> Any:
        outputs = original()
        if not core.result_queue and not core.scheduler.waiting_queue:  # nothing to compute here
            arrivals = messages.times["decode"]
            next_time = arrivals[0] if arrivals else own.host_time
            clock.wait_until(next_time if core.scheduler.transfer_queue else clock.host_time)
            outputs += core.receiver.receive()
        return outputs

    wrap(core, "run_prefill", run_prefill)
    wrap(core, "step", step)
    link_words = f"{GIGABYTES_PER_SECOND:g} GB/s for {TOKEN_BYTES >> 10} KiB a token"
    return f", two machines, and a link of {link_words}"
