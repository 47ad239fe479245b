"""Percentiles and goodput of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from common.displays.workload import percentile

from .client import Answer

POINTS = (50, 95, 99)


@dataclass(frozen=True)
class Limits:
    """What makes an answer good: its first token and its mean time per token, in seconds."""

    first: float
    per_token: float

    def holds(self, answer: Answer) -> bool:
        """Return whether an answer is complete, and within the limits."""
        if answer.error is not None or answer.first is None:
            return False
        return answer.first <= self.first and answer.per_token <= self.per_token


@dataclass(frozen=True)
class Row:
    """The figures of one rate. Requests that arrived during the warm-up are not counted.

    Percentiles are in milliseconds, and None without answers. goodput: good answers per second.
    """

    rate: float
    seconds: float
    num_requests: int
    num_failed: int
    goodput: float
    tokens_per_second: float
    first_ms: dict[int, float] | None
    gap_ms: dict[int, float] | None
    most_late_ms: float
    errors: dict[str, int]


def summary(
    rate: float, seconds: float, answers: Sequence[Answer], warm_up: float, limits: Limits
) -> Row:
    """Return the figures of the requests that arrived in the `seconds` after the warm-up."""
    counted = [answer for answer in answers if answer.arrival.time >= warm_up]
    errors: dict[str, int] = {}
    for answer in counted:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    ended = max((a.arrival.time + a.late + a.total - warm_up for a in counted), default=0.0)
    return Row(
        rate=rate,
        seconds=seconds,
        num_requests=len(counted),
        num_failed=sum(errors.values()),
        goodput=sum(map(limits.holds, counted)) / seconds,
        tokens_per_second=sum(a.num_tokens for a in counted) / max(ended, seconds),
        first_ms=_percentiles([a.first for a in counted if a.first is not None]),
        gap_ms=_percentiles([gap for a in counted for gap in a.gaps]),
        most_late_ms=1000 * max((a.late for a in counted), default=0.0),
        errors=errors,
    )


def _percentiles(values: list[float]) -> dict[int, float] | None:
    return {point: 1000 * percentile(values, point) for point in POINTS} if values else None


def table(rows: Sequence[Row], title: str) -> Table:
    """Return the figures as a table: rate against goodput and latency."""
    shown = Table(title=title)
    names = [f"TTFT p{point}" for point in POINTS] + [f"ITL p{point}" for point in POINTS]
    for name in ("requests/s", "sent", "failed", "goodput/s", "tokens/s", *names):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = [f"{row.rate:g}", str(row.num_requests), str(row.num_failed)]
        figures += [f"{row.goodput:.2f}", f"{row.tokens_per_second:.0f}"]
        for found in (row.first_ms, row.gap_ms):
            figures += [f"{found[p]:.0f} ms" if found else "-" for p in POINTS]
        shown.add_row(*figures)
    return shown
