"""The text of a request's output: detokenized, and watched for stop strings (I6)."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from .detokenizer import IncrementalDetokenizer
from .sampling_params import SamplingParams


class OutputText:
    """Grows token by token. `visible` is safe to show: it is only ever extended.

        decoded  "The answer is 42\\nQu"        stop = ["\\nQuestion:"]
        visible  "The answer is 42"            held back: it may become the stop string

    The stop string that is complete first ends the text, wherever token boundaries lie; of two
    complete at the same character the longer one counts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> None:
        self.detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self.stop: tuple[str, ...] = tuple(params.stop)
        self.decoded = ""
        self.visible = ""

    def append(self, token_id: int) -> bool:
        """Add a token; return True if it completed a stop string, which then ends the text."""
        piece = self.detokenizer.append(token_id)
        searched = len(self.decoded)
        self.decoded += piece
        if not self.stop:
            self.visible = self.decoded
            return False
        if (end := self._find_stop(searched)) is not None:
            self.visible = self.decoded = self.decoded[:end]
            return True
        self.visible = self.decoded[: len(self.decoded) - self._held_back()]
        return False

    def finish(self) -> bool:
        """No more tokens: show what was held back for a character or a stop string to complete.

        Returns True if a stop string was in it, which then ends the text.
        """
        searched = len(self.decoded)
        self.decoded += self.detokenizer.flush()
        end = self._find_stop(searched)
        self.visible = self.decoded = self.decoded[:end]
        return end is not None

    def _find_stop(self, searched: int) -> int | None:
        """Where the text ends, if a stop string ends after character `searched`."""
        found = []
        for stop in self.stop:
            start = self.decoded.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(max(map(len, self.stop)) - 1, len(self.decoded))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.decoded[-length:]) for stop in self.stop):
                return length
        return 0
