"""`HostPool`: pages of the KV cache in host memory, and the copies between it and the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import groupby

import torch

from .hi_radix_cache import Transfer
from .kv_pool import KVPool, free_memory
from .stream import CudaEvent, Event

HOST_RATIO = 2  # host pages for each page of the device, if there is memory for them
MOST_PAGES = 16  # copied at once: this takes device memory for that many pages twice


class HostPool:
    """Host pages, [num_pages, values of a page]. A row has the keys of all layers, then the values.

    On a GPU the memory is pinned, so that the host does not wait for copies.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        memory = self._memories()[0]
        self.on_gpu = memory.device.type == "cuda"
        page_values = sum(m[:, 0].numel() for m in self._memories())
        free = 1 << free_memory(torch.device("cpu")).bit_length() >> 1  # torch pins a power of two
        self.num_pages = min(HOST_RATIO * pool.num_pages, free // (page_values * memory.itemsize))
        shape = (self.num_pages, page_values)
        self.pages = torch.empty(shape, dtype=memory.dtype, pin_memory=self.on_gpu)

    @torch.inference_mode()
    def copy(self, transfers: Sequence[Transfer], before_loading: Callable[[], None]) -> None:
        """Copy pages in order. Call `before_loading` before pages of the device are written."""
        for to_host, group in groupby(transfers, key=lambda transfer: transfer.to_host):
            if not to_host:
                before_loading()
            part = list(group)
            for start in range(0, len(part), MOST_PAGES):
                (self._write if to_host else self._read)(part[start : start + MOST_PAGES])

    def measure(self) -> float:
        """Return the seconds that the copy of a page takes. No page may be in use."""
        pages = range(min(self.num_pages, MOST_PAGES))
        for _ in range(2):  # the first copy is slower
            started = time.perf_counter()
            self.copy([Transfer(0, page, to_host=True) for page in pages], lambda: None)
            if self.on_gpu:
                torch.cuda.synchronize(self.pool.keys[0].device)
        return (time.perf_counter() - started) / max(1, len(pages))

    def _write(self, transfers: Sequence[Transfer]) -> None:
        """Gather pages into one tensor on the device, and copy its rows to the host."""
        ids = self._page_ids(transfers)
        parts = [m.index_select(1, ids).transpose(0, 1).flatten(1) for m in self._memories()]
        for row, transfer in zip(torch.cat(parts, 1), transfers, strict=True):
            self.pages[transfer.host_page].copy_(row, non_blocking=True)

    def _read(self, transfers: Sequence[Transfer]) -> None:
        """Copy rows from the host into one tensor on the device, and scatter it over the pages."""
        ids, memories, count = self._page_ids(transfers), self._memories(), len(transfers)
        rows = self.pages.new_empty((count, self.pages.shape[1]), device=ids.device)
        for row, transfer in zip(rows, transfers, strict=True):
            row.copy_(self.pages[transfer.host_page], non_blocking=True)
        parts = rows.split([memory[:, 0].numel() for memory in memories], 1)
        for memory, part in zip(memories, parts, strict=True):
            part = part.reshape(count, memory.shape[0], *memory.shape[2:])
            memory.index_copy_(1, ids, part.transpose(0, 1))

    def _memories(self) -> list[torch.Tensor]:
        return [*self.pool.keys, *self.pool.values]

    def _page_ids(self, transfers: Sequence[Transfer]) -> torch.Tensor:
        ids = torch.tensor([transfer.page for transfer in transfers], pin_memory=self.on_gpu)
        return ids.to(self.pool.keys[0].device, non_blocking=True)


def wait_in_stream(event: Event | None, raising: bool = True) -> None:
    """Let the current stream wait for an event. On CUDA, the host does not wait.

    raising: whether a failure of the work before the event is raised here.
    """
    if isinstance(event, CudaEvent):
        torch.cuda.current_stream().wait_event(event.ended)
    elif event is not None:
        with nullcontext() if raising else suppress(BaseException):
            event.wait()
