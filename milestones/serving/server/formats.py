"""The bodies of answers in OpenAI's two APIs, whole and as the chunks of a stream.

A delta is a `CompletionOutput` with the part that the client does not have yet. In an answer that
is not streamed, it is the whole output.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from common import CompletionOutput, RequestOutput

from .token_bytes import TokenBytes

Body = dict[str, Any]
LEAST_LOGPROB = -9999.0  # in place of -inf, which JSON does not have


class Format(ABC):
    """The bodies of one API call."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokens: TokenBytes, num_top: int) -> None:
        self.call_id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.tokens = tokens
        self.num_top = num_top  # most likely tokens in the log probabilities
        self.created = int(time.time())

    def whole(self, deltas: Sequence[CompletionOutput], usage: Body) -> Body:
        """Return the body of an answer that is not streamed."""
        choices = [self.choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self.body(self.whole_object, choices), "usage": usage}

    def chunk(self, index: int, delta: CompletionOutput) -> Body:
        """Return a chunk of a stream."""
        return self.body(self.chunk_object, [self.chunk_choice(index, delta)])

    def usage_chunk(self, usage: Body) -> Body:
        """Return the last chunk of a stream, which has no choice."""
        return {**self.body(self.chunk_object, []), "usage": usage}

    def first_chunk(self, index: int) -> Body | None:
        """Return the chunk with which a choice begins, if it has one."""
        return None

    def received(self, index: int, output: RequestOutput) -> RequestOutput:
        """Return an output as the client sees it. index: of its first choice.

        It is called with each output, before the choices are made.
        """
        return output

    @property
    def is_slow(self) -> bool:
        """Return whether a body may take so long to make that other calls would notice it."""
        return False

    @abstractmethod
    def choice(self, index: int, delta: CompletionOutput) -> Body:
        """Return a choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        """Return a choice of a chunk."""

    def top(self, logprobs: dict[int, float]) -> list[tuple[int, float]]:
        """Return the most likely tokens, the most likely one first."""
        ranked = sorted(logprobs.items(), key=lambda item: -item[1])
        return [(token_id, max(value, LEAST_LOGPROB)) for token_id, value in ranked[: self.num_top]]

    def body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage(outputs: Sequence[RequestOutput]) -> Body:
    """Return the token counts of an API call. Each prompt counts once, however many choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
