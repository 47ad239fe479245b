"""`TransferMeter`: what a prefill process has sent, and how much of it was hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .messages import Transfer

if TYPE_CHECKING:
    from ...electives.disaggregated.model_runner import PrefillRunner

Span = tuple[float, float]


class TransferMeter:
    """Compares the times of sends with those of forwards. Both streams record them."""

    def __init__(self, runner: PrefillRunner) -> None:
        self.runner = runner
        self.seen = 0.0  # the end of the newest send that is counted
        self.total = Transfer()
        pools = [*runner.kv_pool.keys, *runner.kv_pool.values]
        self.page_bytes = sum(pool[:, 0].numel() * pool.element_size() for pool in pools)

    def read(self, is_idle: bool) -> Transfer:
        """Return what has been sent so far.

        A send is counted when a later forward has ended, or when no forward runs: before, it is not
        known whether it was hidden.
        """
        forwards, sends = list(self.runner.stream.spans), list(self.runner.send_stream.spans)
        last = float("inf") if is_idle else max((end for _, end in forwards), default=0.0)
        new = [span for span in sends if self.seen < span[1] <= last]
        self.seen = max((end for _, end in new), default=self.seen)
        self.total += Transfer(
            seconds=sum(end - begin for begin, end in new),
            hidden_seconds=sum(overlap(span, forwards) for span in new),
        )
        num_bytes = self.runner.num_pages_sent * self.page_bytes
        return Transfer(num_bytes, self.total.seconds, self.total.hidden_seconds)


def overlap(span: Span, others: Sequence[Span]) -> float:
    """Return the seconds of a span in which one of the others runs. These do not overlap.

    others: oldest first. The span is new, so the search begins with the newest.
    """
    begin, end = span
    seconds = 0.0
    for other_begin, other_end in reversed(others):
        if other_end <= begin:
            break
        seconds += max(0.0, min(end, other_end) - max(begin, other_begin))
    return seconds
