"""`Request`: one prompt and its state in an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from .sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from .text.output_text import OutputText


class Request:
    """The tokens, the text and the progress of a request. The engine that runs it owns it.

        token_ids  [ prompt .................. | output ........ ]
                   0                  num_prompt_tokens       num_tokens
        KV cache   [ computed ..................... )
                                         num_computed_tokens

    I1: the position of a token is always the number of tokens before it. A step computes
    `token_ids[num_computed_tokens:]` or the first part of it. When a step reaches the end of
    `token_ids`, a new token is sampled.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_model_len: int,
        text: OutputText,
        arrival_time: float,
        stop_token_ids: frozenset[int] = frozenset(),
        end_token_ids: np.ndarray | None = None,
    ) -> None:
        """stop_token_ids: the tokens that end the output.

        end_token_ids: the tokens that `min_tokens` forbids, if the parameters have it.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed  # from `params`, or drawn at random for this request
        self.prompt_token_ids = list(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        # Known in advance: a request never needs KV for more than `max_num_tokens - 1` tokens.
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self.stop_token_ids = stop_token_ids
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.text = text
        # A stop string may end the output before the last of several new tokens; else None.
        self.output_end: int | None = None
        self.end_token_ids = end_token_ids
        self._token_array: np.ndarray | None = None  # see `token_array`
        self._num_known_tokens = 0  # of `_token_array`: they do not change any more

        self.num_computed_tokens = 0  # the keys and values of so many tokens are in the cache
        # Prompt tokens found in the prefix cache when the request first ran; None before that.
        self.num_cached_tokens: int | None = None
        self.row: int | None = (
            None  # of the KV cache or page table, while it runs
        )
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # why the request ended, if the finish reason is "error"

        self.priority = 0  # a lower value is more urgent; only engines with priorities use it
        self.adapter: Any = None  # its LoRA adapter; only engines with adapters use it
        self.arrival_time = arrival_time
        self.first_token_time: float | None = None
        self.finished_time: float | None = None
        self._metrics: RequestMetrics | None = None  # of the last output

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that steps must still compute. With one token left, the request decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def token_array(self) -> np.ndarray:
        """Return `token_ids` as an array, [num_tokens] int64. It is valid until the next call.

        The array is kept, and only new tokens are converted. Known tokens never change; in m5, the
        last one may be a placeholder, a negative number.
        """
        import numpy as np  # not above: a request is plain data

        known, num_tokens = self._num_known_tokens, len(self.token_ids)
        array = self._token_array
        if array is None or num_tokens > len(array):
            known, array = 0, np.empty(2 * num_tokens, np.int64)
        array[known:num_tokens] = self.token_ids[known:]
        self._token_array = array
        self._num_known_tokens = num_tokens - (self.token_ids[-1] < 0)
        return array[:num_tokens]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return the current output. It is a snapshot: later steps do not change it."""
        metrics = self._metrics
        # From the first token to the last but one, the metrics do not change.
        if metrics is None or self.finish_reason is not None:
            metrics = self._metrics = RequestMetrics(
                self.arrival_time,
                self.first_token_time,
                self.finished_time,
                self.num_cached_tokens or 0,
            )
        token_ids = self.token_ids[self.num_prompt_tokens : self.output_end]
        completion = CompletionOutput(
            self.text.visible,
            token_ids,
            self.finish_reason,
            None if self.logprobs is None else self.logprobs[: len(token_ids)],
            self.error,
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,  # no step changes it, so all outputs have the same list
            [completion],
            self.finish_reason is not None,
            metrics,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
