"""`/metrics` for Prometheus, with vLLM's names where the meaning is the same.

Histograms and counters of requests are recorded in the engine's thread, after each step. The
engine's own counters (`EngineStats`) are read at each scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common import EngineStats, PoolingRequestOutput, RequestOutput
from common.outputs import FinishReason, StepCounters

from .engine_thread import EngineRequest, Observer

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
                10, 20, 40, 80, 160)  # fmt: skip
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
               1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKEN_BUCKETS = tuple(2**power for power in range(15))
STEP_COUNTERS = {field.name for field in fields(StepCounters)} | {"num_graph_replays"}


disable_created_metrics()  # they would double the page


@dataclass
class Times:
    """When a request arrived and moved last, and the number of its tokens then."""

    arrival: float
    last: float
    num_tokens: int = 0


class Metrics(Observer):
    """The metrics of one server. `added` and `stepped` are called in the engine's thread."""

    def __init__(self, model: str, others: Sequence[Collector] = ()) -> None:
        """others: those of the engine itself."""
        self.registry = CollectorRegistry()
        for collector in others:
            self.registry.register(collector)
        self.stats = StatsCollector(model)
        self.registry.register(self.stats)
        self._live: dict[str, Times] = {}
        self._model = model

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(
                f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return made.labels(model)

        def counter(name: str, text: str) -> Counter:
            made = Counter(f"vllm:{name}", text, ["model_name"], registry=self.registry)
            return made.labels(model)

        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token",
                              TTFT_BUCKETS)  # fmt: skip
        self.itl = histogram("inter_token_latency_seconds", "From a token to the next one",
                             ITL_BUCKETS)  # fmt: skip
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", E2E_BUCKETS)
        self.prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens of a request",
                                      TOKEN_BUCKETS)  # fmt: skip
        self.output_sizes = histogram("request_generation_tokens", "Output tokens of a request",
                                      TOKEN_BUCKETS)  # fmt: skip
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began")
        self.output_tokens = counter("generation_tokens", "Output tokens")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.hits = counter("prefix_cache_hits", "Prompt tokens that the cache had")
        self.ended = Counter(
            "vllm:request_success", "Requests that ended, by reason",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip

    def added(self, request: EngineRequest) -> None:
        """Begin to measure a request, from the arrival of its API call."""
        self._live[request.request_id] = Times(request.arrival_time, request.arrival_time)

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        """Record the outputs of a step."""
        now = time.perf_counter()
        for output in outputs:
            if (times := self._live.get(output.request_id)) is None:
                continue  # it was not added by an API call
            if isinstance(output, PoolingRequestOutput):
                self._count_prompt(output)
                self._end(output, now - times.arrival, 0, [output.outputs.finish_reason])
                continue
            num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
            new = num_tokens - times.num_tokens
            if new and times.num_tokens == 0:
                self._begin(output, now - times.arrival)
            elif new:
                for _ in range(new):
                    self.itl.observe((now - times.last) / new)
            if new:
                self.output_tokens.inc(new)
                times.num_tokens, times.last = num_tokens, now
            if output.finished:
                reasons = [choice.finish_reason for choice in output.outputs]
                self._end(output, now - times.arrival, num_tokens, reasons)

    def page(self, stats: EngineStats | None) -> bytes:
        """Return the page for Prometheus. stats: those of now; None: there is no engine."""
        self.stats.newest = stats
        return generate_latest(self.registry)

    def _begin(self, output: RequestOutput, seconds: float) -> None:
        self.ttft.observe(seconds)
        self._count_prompt(output)

    def _count_prompt(self, output: RequestOutput) -> None:
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.queries.inc(len(output.prompt_token_ids))
        self.hits.inc(output.metrics.num_cached_tokens)

    def _end(
        self,
        output: RequestOutput,
        seconds: float,
        num_tokens: int,
        reasons: Sequence[FinishReason | None],
    ) -> None:
        del self._live[output.request_id]
        self.e2e.observe(seconds)
        self.prompt_sizes.observe(len(output.prompt_token_ids))
        self.output_sizes.observe(num_tokens)
        for reason in reasons:
            self.ended.labels(self._model, reason).inc()


class StatsCollector(Collector):
    """The counters of the engine: some have a name in vLLM, all have one with `ladder:`."""

    def __init__(self, model: str) -> None:
        self.newest: EngineStats | None = None
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest stats."""
        if (stats := self.newest) is None:
            return
        yield self._gauge("vllm:num_requests_running", "Requests that run", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait", stats.num_waiting)
        if stats.kv_pages_total:
            used = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
            share = used / stats.kv_pages_total
            yield self._gauge("vllm:kv_cache_usage_perc", "Pages of requests; 1 is all", share)
        yield self._counter("vllm:num_preemptions", "Retractions", stats.num_retractions)
        for field in fields(stats):
            make = self._counter if field.name in STEP_COUNTERS else self._gauge
            text = f"{field.name} of EngineStats"
            yield make(f"ladder:{field.name}", text, getattr(stats, field.name))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
