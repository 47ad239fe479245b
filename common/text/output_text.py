"""The text of a request's output: detokenized, and searched for stop strings (I6)."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ..sampling.params import SamplingParams
from .detokenizer import IncrementalDetokenizer


class OutputText:
    """The text of an output, which grows token by token.

    `visible` is safe to show: later tokens only extend it.

        decoded  "The answer is 42\\nQu"        stop = ["\\nQuestion:"]
        visible  "The answer is 42"            held back: it may become the stop string

    The stop string that is complete first ends the text. It does not matter where the token
    boundaries lie. If two stop strings are complete at the same character, the longer one counts. A
    stop string that is complete within the first `min_tokens` tokens does not end the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self.stop = params.stop_strings
        self.num_exempt = params.min_tokens  # tokens to come that no stop string ends
        self.held = ""  # the longest end of `decoded` that begins a stop string
        self.decoded = ""
        self.visible = ""

    def append(self, token_id: int) -> bool:
        """Add a token; return True if it completed a stop string, which then ends the text."""
        piece = self.detokenizer.append(token_id)
        if self.stop is None:  # the usual case: nothing is held back
            self.visible = self.decoded = self.decoded + piece
            return False
        if self._add(piece):
            return True
        self.num_exempt = max(0, self.num_exempt - 1)
        self.visible = self.decoded[: len(self.decoded) - len(self.held)]
        return False

    def finish(self) -> bool:
        """Show the text that was held back, because no more tokens will come.

        Returns True if a stop string was in it, which then ends the text.
        """
        if self._add(self.detokenizer.flush()):
            return True
        self.visible = self.decoded
        return False

    def _add(self, piece: str) -> bool:
        """Add decoded text. If a stop string is complete, end the text before it; return True."""
        before = len(self.decoded)
        self.decoded += piece
        if self.stop is None:
            return False
        if self.num_exempt > 0:
            self.held = self.stop.skip(self.held, piece)
            return False
        self.held, place = self.stop.find(self.held, piece)
        if place is not None:
            self.visible = self.decoded = self.decoded[: before + place]
        return place is not None
