"""The prefill side of an engine with two sides, on hashes: it sends pages as a `PrefillRunner`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from milestones.lab.instruments.streams import HandEvent
from tests.helpers.fake_overlap import HashResult, HashRunner


class HashPrefillRunner(HashRunner):
    """Computes hashes in its own memory, and copies their pages to the memory of `target`."""

    windows: Any  # of the transport

    def __init__(self, target: HashRunner) -> None:
        super().__init__(target.kv_pool.num_pages, target.page_size, type(target.stream)())
        self.target = target
        self.send_stream = type(target.stream)()
        self.sent = self.send_stream.launch(lambda: None)
        self.num_pages_sent = 0
        self.sends: list[Any] = []  # of the step that is launched
        self.writes: list[tuple[int, int, int]] = []  # attempt, source, target: all pages sent
        self.send_fails: Callable[[], bool] = bool  # asked by each send

    def launch(self, batch: Any, table: Any) -> HashResult:
        self.sends = list(batch.sends)
        return super().launch(batch, table)

    def launch_after_copies(self, work: Any) -> HandEvent:
        """Launch work that waits for earlier sends, and then sends the pages of its step."""
        sends, self.sends = self.sends, []
        reusable = self.copied

        def compute_and_send() -> None:
            if reusable is not None:
                with suppress(RuntimeError):  # of a send: it is seen elsewhere
                    reusable.wait()
            work()
            if sends:
                self.sent = self.send_stream.launch(lambda: self.send(sends))

        return self.stream.launch(compute_and_send)

    def send(self, sends: list[Any]) -> None:
        if self.send_fails():
            raise RuntimeError("a send fails")
        for send in sends:
            for source, target in zip(send.sources, send.targets, strict=True):
                with self.windows.writing(send.attempt) as is_open:
                    if is_open:
                        self.copy_page(source, target)
                        self.writes.append((send.attempt, source, target))
        self.num_pages_sent += sum(len(send.sources) for send in sends)

    def copy_page(self, source: int, target: int) -> None:
        assert target not in self.target.free_pages, "I3: a free page is written"
        for offset in range(self.page_size):
            value = self.memory.get(source * self.page_size + offset)
            if value is not None:
                self.target.memory[target * self.page_size + offset] = value

    def mark_sends(self) -> HandEvent:
        return self.send_stream.launch(lambda: None)

    def settle(self, result: HashResult) -> HandEvent:
        self.copied = self.sent  # or that of a later step
        return self.sent

    def end_sends(self) -> None:
        self.send_stream.synchronize()
        self.copied = None
