"""`ModelRunner`: two runners of one model. That of the prefill side sends pages while it computes.

    forward stream   | layer 0 | layer 1 | layer 2 | ... | sample |
    send stream                | pages 0 | pages 1 | ... | pages L |

A layer of a page can be sent as soon as its keys and values are stored, while the next layer is
computed. Only the last layer, and what a slow link has not yet sent, comes after the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from common import EngineConfig

from .kv_pool import KVPool
from .m5_model_runner import ModelRunner as M5ModelRunner
from .m5_model_runner import Step as M5Step
from .m5_model_runner import StepResult
from .schedule_batch import PageSend, ScheduleBatch
from .stream import CudaEvent, Event, open_stream
from .transport import Windows

__all__ = ["ModelRunner", "PrefillRunner", "SendingResult", "Step", "StepResult"]


class ModelRunner(M5ModelRunner):
    """The runner of the decode side. It makes that of the prefill side."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises `ValueError` on a GPU without `num_pages`: two pools share its memory."""
        if model.device.type == "cuda" and config.num_pages is None:
            raise ValueError("num_pages=None needs one pool for each GPU: set num_pages")
        super().__init__(model, config)
        num_pages = self.kv_pool.num_pages
        config = replace(config, num_pages=num_pages, cuda_graph=False)  # it never decodes
        self.prefill_runner = PrefillRunner(model, config, self.kv_pool)


@dataclass
class Step(M5Step):
    """What the host has prepared for a step, and the pages that it sends.

    reusable: set when the sends of all steps are done with pages that this step may write.
    """

    sends: list[PageSend]
    reusable: Event | None


class SendingResult(StepResult):
    """The tokens of a step. sent: set when the pages of the step are sent."""

    sent: Event | None = None


class SendingOps:
    """The attention functions of a runner. It hears when keys and values of a layer are stored."""

    def __init__(self, ops: Any, on_stored: Callable[[torch.Tensor], None]) -> None:
        self.ops = ops
        self.on_stored = on_stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def store_kv(self, keys: torch.Tensor, *others: Any) -> None:
        self.ops.store_kv(keys, *others)
        self.on_stored(keys)


class PrefillRunner(M5ModelRunner):
    """Computes prompts, and writes their pages to another pool, layer by layer."""

    result_class = SendingResult
    windows: Windows  # of the transport

    def __init__(self, model: PreTrainedModel, config: EngineConfig, target: KVPool) -> None:
        super().__init__(model, config)
        self.target = target
        self.ops: Any = SendingOps(self.ops, self.layer_stored)
        self.send_stream = open_stream(model.device, 0.0)
        self.send_stream.wait_before_freeing(self)
        self.sent: Event | None = self.send_stream.launch(lambda: None)  # after the newest send
        self.reusable: Event | None = None
        self.sends: list[PageSend] = []  # of the step that is computed
        self.unsent: dict[int, int] = {}  # layers of this step, by the address of their keys
        self.num_pages_sent = 0

    def prepare(self, batch: ScheduleBatch) -> Step:
        return Step(**vars(super().prepare(batch)), sends=batch.sends, reusable=self.reusable)

    def run_step(self, step: M5Step, result: StepResult) -> None:
        super().run_step(step, result)
        assert isinstance(result, SendingResult)
        result.sent = self.sent

    def compute(self, step: M5Step) -> torch.Tensor:
        """Return the logits of a step. Its pages are being sent when this returns."""
        assert isinstance(step, Step)
        wait_in_stream(step.reusable)
        self.sends = step.sends
        self.unsent = {keys.data_ptr(): i for i, keys in enumerate(self.kv_pool.keys)}
        logits = super().compute(step)
        for layer in self.unsent.values():  # a forward of a kind that stores them unseen
            self.send_layer(layer)
        self.sends, self.unsent = [], {}
        return logits

    def layer_stored(self, keys: torch.Tensor) -> None:
        """Send the pages of a layer, if this step completes any."""
        layer = self.unsent.pop(keys.data_ptr(), None)
        if layer is not None:
            self.send_layer(layer)

    def send_layer(self, layer: int) -> None:
        """Queue the copies of one layer's pages behind those of the layers before."""
        sends, stored = self.sends, mark(self.kv_pool.keys[layer].device)

        def work() -> None:
            if stored is not None:
                torch.cuda.current_stream().wait_event(stored)
            for send in sends:
                with self.windows.writing(send.attempt) as is_open:
                    if is_open:
                        self.copy(layer, send)

        if sends:
            self.sent = self.send_stream.launch(work)

    @torch.inference_mode()
    def copy(self, layer: int, send: PageSend) -> None:
        """Copy one layer of pages to the decode side."""
        pools = self.kv_pool.keys[layer], self.kv_pool.values[layer]
        sources = torch.tensor(send.sources, device=pools[0].device)
        keys, values = (pool.index_select(1, sources) for pool in pools)
        self.write(layer, send, keys, values)
        self.num_pages_sent += len(send.sources) * (layer == 0)

    def write(self, layer: int, send: PageSend, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write pages, [heads, pages, page_size, D], into the pool of the decode side."""
        targets = torch.tensor(send.targets, device=keys.device)
        self.target.keys[layer].index_copy_(1, targets, keys)
        self.target.values[layer].index_copy_(1, targets, values)

    def mark_sends(self) -> Event:
        """Return the event of all pages that have been sent so far."""
        return self.send_stream.launch(lambda: None)

    def settle(self, result: StepResult) -> Event | None:
        """Return the event of the pages that a step has sent. The host has its result.

        These pages may become free now. Steps that are launched from here on may write to them, so
        these steps wait for the event.
        """
        assert isinstance(result, SendingResult)
        self.reusable = result.sent
        return result.sent

    def end_sends(self) -> None:
        """Wait for all sends, and clear their failures."""
        self.send_stream.synchronize()
        self.reusable = None

    def close(self) -> None:
        self.stream.close()
        self.send_stream.close()  # its copies use the memory of both pools
        super().close()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event at the current place of the current stream. A CPU has none."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def wait_in_stream(event: Event | None) -> None:
    """Let the current stream wait for an event. A failure before the event is seen elsewhere."""
    if isinstance(event, CudaEvent):
        torch.cuda.current_stream().wait_event(event.ended)
    elif event is not None:
        try:
            event.wait()
        except Exception:
            return
