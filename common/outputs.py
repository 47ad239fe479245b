"""The values that an engine returns: the outputs of requests, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """The whole output of a request so far; of a request with n > 1, one of its n outputs.

    text: the decoded output; it never contains half a character or the start of a stop string (I6).
    token_ids: the output tokens, including the one that ended the request.
    finish_reason: `stop` (end-of-sequence, a stop token or stop string), `length` (`max_tokens` or
        `max_model_len` reached), `abort`, `error` (the request could not be computed); None while
        the request is live.
    logprobs: for each output token, token id -> log probability; None if not requested.
    error: one sentence that says what went wrong, if the finish reason is `error`.
    index: the place of this output among the n outputs of the request.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None
    index: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """The times of the events in the life of a request, in seconds of the engine's clock."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens with KV from the prefix cache

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of one request after a step. It is cumulative: the newest output has everything.

    Each request ends with exactly one output that has `finished=True`. With n > 1, that is when all
    of its outputs have finished. `outputs` always has n entries, in order of their `index`.

    prompt_logprobs: for each token of the prompt, token id -> log probability; None for the first
        token, and for tokens that have not been computed. None if they were not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The vector of a pooling request.

    data: [H] or [dimensions] float32, on the host; None if the request was aborted or failed.
    finish_reason, error: as those of `CompletionOutput`; `stop` if there is a vector.
    """

    data: torch.Tensor | None
    finish_reason: FinishReason
    error: str | None = None


@dataclass(slots=True, eq=False)
class PoolingRequestOutput(RequestOutput):
    """The only output of a pooling request, as in vLLM: `output.outputs.data` is the vector."""

    outputs: PoolingOutput  # type: ignore[assignment]  # one vector takes the place of the list


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine. The first seven are current values; the others count from the start.

    KV memory is counted in tokens. `kv_tokens_reserved` is the memory that running requests hold;
    `kv_tokens_used` is the part of it that contains keys and values. The page counters count the
    pages that can be allocated: the padding page is in none of them.
    """

    num_waiting: int = 0
    num_running: int = 0
    kv_tokens_reserved: int = 0
    kv_tokens_used: int = 0
    kv_pages_total: int = 0
    kv_pages_free: int = 0
    kv_pages_cached: int = 0
    prefill_tokens: int = 0  # prompt tokens computed, counted again after a retraction
    decode_tokens: int = 0  # output tokens computed, counted again after a retraction
    padding_tokens: int = 0  # positions computed that belong to no request
    cached_prompt_tokens: int = 0  # prompt tokens with KV from the prefix cache
    num_retractions: int = 0
    num_steps: int = 0  # steps that ran a forward
    num_graph_replays: int = 0  # of these, steps that replayed a CUDA graph; 0 on a CPU
    num_draft_tokens: int = 0  # tokens that a drafter guessed and a step computed
    num_accepted_tokens: int = 0  # of these, guesses that were right
    num_encoded_images: int = 0  # images that the vision encoder computed, some more than once


@dataclass
class StepCounters:
    """The cumulative counters of `EngineStats`, which an engine increments."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_retractions: int = 0
    num_steps: int = 0
