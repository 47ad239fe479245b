"""`Choice`: what a client has of one output; its deltas are what it does not have yet."""

from __future__ import annotations

from dataclasses import dataclass

from common import CompletionOutput, FinishReason


@dataclass(frozen=True)
class Delta:
    """The new part of an output since the last delta.

    logprobs: one entry for each of the new tokens, in order; None if not requested. The text of a
        token may come in a later delta, because half a character is held back.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason | None


class Choice:
    """The progress of one choice of an answer. Outputs are cumulative, deltas are not."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_finished = False
        self._num_characters = 0
        self._num_tokens = 0

    def advance(self, output: CompletionOutput) -> Delta | None:
        """Return what is new in the newest output; None if a client would not notice it."""
        if self.is_finished:
            return None
        new = slice(self._num_tokens, None)
        delta = Delta(
            output.text[self._num_characters :],
            output.token_ids[new],
            None if output.logprobs is None else output.logprobs[new],
            output.finish_reason,
        )
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        self._num_characters = len(output.text)
        self._num_tokens = len(output.token_ids)
        self.is_finished = delta.finish_reason is not None
        return delta
