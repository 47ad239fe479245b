"""`Request`: one prompt and its state in an engine. `ParentRequest`: one with n > 1 outputs.

Schedulers and model runners see no parents, only their children, which are requests with n=1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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
        # Of each token of the prompt: None at first, and always for the first token.
        self.prompt_logprobs: list[dict[int, float] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.num_prompt_tokens
        self.text = text
        # A stop string may end the output before the last of several new tokens; else None.
        self.output_end: int | None = None
        self.end_token_ids = end_token_ids
        self._token_array: np.ndarray | None = None  # see `token_array`
        self._num_known_tokens = 0  # of `_token_array`: they do not change any more

        self.num_computed_tokens = 0  # the keys and values of that many tokens are in the cache
        # Prompt tokens found in the prefix cache when the request first ran; None before that.
        self.num_cached_tokens: int | None = None
        self.row: int | None = None  # of the KV cache or page table, while it runs
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # why the request ended, if the finish reason is "error"

        self.priority = 0  # a lower value is more urgent; only engines with priorities use it
        self.agent_hint: Any = None  # of its conversation; only engines with hints use it
        self.adapter: Any = None  # its LoRA adapter; only engines with adapters use it
        self.images: Any = None  # of its prompt, with their places; only engines with images use it
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
    def needs_prompt_logprobs(self) -> bool:
        """Whether the log probability of a prompt token is missing.

        Then all tokens of the prompt must be computed: a cached page has no hidden states.
        """
        known = self.prompt_logprobs
        return known is not None and len(known) > 1 and known[-1] is None

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
            self.prompt_logprobs,  # complete before the first output with a token
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


class Child(NamedTuple):
    """One of the n requests: its id, and its parameters, with a seed of its own and n=1."""

    request_id: str
    params: SamplingParams


class ParentRequest:
    """Creates the children of a request, and merges their outputs into outputs of the request.

    They share the prompt: it is tokenized once, and an engine with a prefix cache computes it once.
    The parent finishes with the last child. Until then, a child that has finished keeps its output.
    The class has vLLM's name.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        arrival_time: float,
    ) -> None:
        """seed: that of the first child, from `params` or drawn at random. Child i has seed + i."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.indices = {f"{i}_{request_id}": i for i in range(params.n)}  # of the children, by id
        self.unfinished = set(self.indices)
        self.outputs = [CompletionOutput("", [], index=i) for i in range(params.n)]
        self.metrics = RequestMetrics(arrival_time)
        self.prompt_logprobs: list[dict[int, float] | None] | None = None  # from the first child

    def children(self) -> Iterator[Child]:
        for request_id, index in self.indices.items():
            params = self.params.of_child(child_seed(self.seed, index), is_first=index == 0)
            yield Child(request_id, params)

    def merge(self, output: RequestOutput) -> RequestOutput:
        """Return the output of the request after a new output of one of its children."""
        index = self.indices[output.request_id]
        (completion,) = output.outputs
        completion.index = index
        self.outputs[index] = completion
        if output.finished:
            self.unfinished.discard(output.request_id)
        self._merge_metrics(index, output.metrics)
        if index == 0:
            self.prompt_logprobs = output.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            list(self.outputs),
            not self.unfinished,
            self.metrics,
            self.prompt_logprobs,
        )

    def _merge_metrics(self, index: int, of_child: RequestMetrics) -> None:
        """Take the first token of any child, the end of the last, and what child 0 found cached.

        The metrics are replaced and not changed: an output that was returned keeps its own.
        """
        known = self.metrics
        times = [t for t in (known.first_token_time, of_child.first_token_time) if t is not None]
        self.metrics = RequestMetrics(
            known.arrival_time,
            min(times, default=None),
            None if self.unfinished else of_child.finished_time,
            known.num_cached_tokens if index > 0 else of_child.num_cached_tokens,
        )


def child_seed(seed: int, index: int) -> int:
    """Return seed + index, which wraps around as a signed integer of 64 bits does."""
    return (seed + index + 2**63) % 2**64 - 2**63
