"""What an engine returns: outputs of requests, and counters of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """All the output of a request so far.

    text: the decoded output; it never holds half a character or the start of a stop string (I6).
    token_ids: the output tokens, the one that ended the request included.
    finish_reason: `stop` (end-of-sequence, a stop token or stop string), `length` (`max_tokens` or
        `max_model_len` reached), `abort`, `error` (the request could not be computed); None while
        the request lives.
    logprobs: for each output token, token id -> log probability; None where not asked for.
    error: what went wrong, in a sentence, if the finish reason is `error`.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused, not computed

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of one request after a step. Cumulative: the newest one says all.

    Each request ends with exactly one output that has `finished=True`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine: the first seven of this moment, the others since the start.

    KV is counted in tokens: `reserved` is what running requests hold, `used` what of it is written.
    Pages count what can be allocated: the padding page is in none of them.
    """

    num_waiting: int = 0
    num_running: int = 0
    kv_tokens_reserved: int = 0
    kv_tokens_used: int = 0
    kv_pages_total: int = 0
    kv_pages_free: int = 0
    kv_pages_cached: int = 0
    prefill_tokens: int = 0  # prompt tokens computed, again after a retraction
    decode_tokens: int = 0  # output tokens fed back, again after a retraction
    padding_tokens: int = 0  # positions computed that belong to no request
    cached_prompt_tokens: int = 0  # prompt tokens whose KV was reused
    num_retractions: int = 0
    num_steps: int = 0  # steps that ran a forward


@dataclass
class StepCounters:
    """The counters of `EngineStats` that add up, while they are being counted."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_retractions: int = 0
    num_steps: int = 0
