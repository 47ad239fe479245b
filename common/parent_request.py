"""`ParentRequest`: a request with n > 1 outputs, each of which a child computes.

The class has vLLM's name. Schedulers and model runners see only the children, requests with n=1.
They share the prompt: it is tokenized once, and an engine with a prefix cache computes it once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .sampling.params import SamplingParams


class Child(NamedTuple):
    """One of the n requests: its id, and its parameters, with a seed of its own and n=1."""

    request_id: str
    params: SamplingParams


class ParentRequest:
    """Creates the children of a request, and merges their outputs into outputs of the request.

    The parent finishes with the last child. Until then, a child that has finished keeps its output.
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

    def children(self) -> Iterator[Child]:
        for request_id, index in self.indices.items():
            yield Child(request_id, self.params.of_child(child_seed(self.seed, index)))

    def merge(self, output: RequestOutput) -> RequestOutput:
        """Return the output of the request after a new output of one of its children."""
        index = self.indices[output.request_id]
        (completion,) = output.outputs
        completion.index = index
        self.outputs[index] = completion
        if output.finished:
            self.unfinished.discard(output.request_id)
        self._merge_metrics(index, output.metrics)
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            list(self.outputs),
            not self.unfinished,
            self.metrics,
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
