"""The metrics of prefill processes and of what they send, for `/metrics` of their decode side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .peer import Peer

LABEL = ["prefill"]  # the number of a prefill process


class TransferCollector(Collector):
    """Reads the newest report of each prefill process."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all prefill processes."""
        size = CounterMetricFamily("ladder:kv_transfer_bytes", "Bytes of pages sent", labels=LABEL)
        time = CounterMetricFamily(
            "ladder:kv_transfer_seconds", "Seconds in which pages were sent", labels=LABEL
        )
        hidden = GaugeMetricFamily(
            "ladder:kv_transfer_hidden_share", "Share of these seconds in which a forward ran",
            labels=LABEL,
        )  # fmt: skip
        deaths = CounterMetricFamily(
            "ladder:prefill_deaths", "Prefill processes that ended", labels=LABEL
        )
        tokens = CounterMetricFamily(
            "ladder:prefill_side_tokens", "Prompt tokens that were computed", labels=LABEL
        )
        running = GaugeMetricFamily(
            "ladder:prefill_side_running", "Attempts that are computed or sent", labels=LABEL
        )
        for peer in self.peers:
            number, report = [str(peer.number)], peer.report
            transfer = report.transfer
            share = transfer.hidden_seconds / transfer.seconds if transfer.seconds else 0.0
            size.add_metric(number, transfer.num_bytes)
            time.add_metric(number, transfer.seconds)
            hidden.add_metric(number, share)
            deaths.add_metric(number, peer.num_deaths)
            tokens.add_metric(number, report.stats.prefill_tokens)
            running.add_metric(number, len(peer.attempts))
        yield from (size, time, hidden, deaths, tokens, running)
