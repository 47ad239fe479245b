"""Tokens to text, one token at a time, never half a character (I6).

A token is some bytes, and a character may need several tokens. Decoding all output anew for each
token would be quadratic, and decoding each token alone would break characters and lose the spaces
that some tokenizers only write between tokens. So the last few tokens are decoded together:

    tokens   ... | t4  t5  t6  t7 | t8         window = t4..t8
    text     ... | "the quick br" | "own"      the first `shown` characters were returned before
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
MAX_WINDOW = 16  # tokens
MIN_CONTEXT = 4  # tokens kept when the window shrinks; a character has at most 4 bytes


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text.

    With a byte-level tokenizer the pieces join to `tokenizer.decode(all tokens)`. Work per token is
    constant, also for endless invalid bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.window: list[int] = []
        self.window_text = ""
        self.shown = 0  # characters of window_text returned so far

    def append(self, token_id: int) -> str:
        """Add a token; return the text that has become certain, perhaps none."""
        self.window.append(token_id)
        self.window_text = text = self._decode(self.window)
        # A trailing replacement character may be the first bytes of a character to come.
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self.shown : certain]
        self.shown = max(self.shown, certain)
        if len(self.window) >= MAX_WINDOW:
            self._shrink_window()
        return piece

    def flush(self) -> str:
        """Return what was held back: the output ended inside a character."""
        piece = self.window_text[self.shown :]
        self.shown = len(self.window_text)
        return piece

    def _shrink_window(self) -> None:
        """Drop old tokens where the cut cannot change what later tokens decode to."""
        for keep in range(MIN_CONTEXT, MIN_CONTEXT + 4):
            head = self._decode(self.window[:-keep])
            tail = self._decode(self.window[-keep:])
            shown = len(tail) - (len(self.window_text) - self.shown)
            at_character = not head.endswith(REPLACEMENT) or head + tail == self.window_text
            if at_character and shown >= 0:
                self.window, self.window_text, self.shown = self.window[-keep:], tail, shown
                return

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(
            token_ids,
            skip_special_tokens=self.skip_special_tokens,
            clean_up_tokenization_spaces=False,  # cleaning rewrites text that was already shown
        )
        assert isinstance(text, str)
        return text
