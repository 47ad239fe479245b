"""Tokens to text, one token at a time, never half a character (I6).

A token is some bytes, and a character may need several tokens. Decoding all output anew for each
token would be quadratic, and decoding each token alone would break characters and lose the spaces
that some tokenizers only write between tokens. So the new tokens are decoded together with the last
few that were shown, and what those alone decode to is taken off:

    tokens   t4  t5 | t6        window = t4 t5 t6, the first two of which are context
    text     the qu | ick       the first `shown` characters were returned before
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
MAX_MISSING = 3  # a character has at most 4 bytes, and a token at least 1
MAX_WINDOW = 16  # tokens


class IncrementalDetokenizer:
    """Turns a growing list of tokens into a growing text.

    With a byte-level tokenizer the pieces join to `tokenizer.decode(all tokens)`. Work per token is
    constant, also for endless invalid bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self.decode = decoder_of(tokenizer)
        self.skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self.window: list[int] = []
        self.num_context = 0  # tokens of the window whose text is shown, kept as context
        self.text = ""  # of the window
        self.shown = 0  # characters of it returned so far

    def append(self, token_id: int) -> str:
        """Add a token; return the text that has become certain, perhaps none."""
        if token_id in self.skipped:
            return ""
        self.window.append(token_id)
        self.text = self.decode(self.window)
        if not self.text.endswith(REPLACEMENT):
            piece = self.text[self.shown :]
            self._start_window(self.window[self.num_context :])
            return piece
        if len(self.window) - self.num_context <= MAX_MISSING:
            return ""  # a character may be in the making
        # So many tokens cannot all belong to one character: some bytes will never be one.
        certain = len(self.text)
        first_uncertain = max(self.shown, certain - MAX_MISSING)
        while certain > first_uncertain and self.text[certain - 1] == REPLACEMENT:
            certain -= 1
        piece = self.text[self.shown : certain]
        self.shown = max(self.shown, certain)
        if len(self.window) >= MAX_WINDOW:
            self._cut_window()
        return piece

    def flush(self) -> str:
        """Return what was held back: the output ended inside a character."""
        piece = self.text[self.shown :]
        self.shown = len(self.text)
        return piece

    def _start_window(self, context: list[int]) -> None:
        """All is shown, up to the end of a character: keep the last piece's tokens as context."""
        text = self.decode(context)
        if text or len(self.window) >= MAX_WINDOW:
            self.window, self.text, self.shown = context, text, len(text)
        else:
            self.shown = len(self.text)
        self.num_context = len(self.window)

    def _cut_window(self) -> None:
        """Among endless invalid bytes: cut where the two sides decode to the same apart."""
        for keep in range(MAX_MISSING, 2 * MAX_MISSING + 1):
            head, tail = self.decode(self.window[:-keep]), self.decode(self.window[-keep:])
            if head + tail == self.text and len(head) <= self.shown:
                self.window, self.text = self.window[-keep:], tail
                self.shown -= len(head)
                self.num_context = 0
                return


@functools.lru_cache(maxsize=8)
def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function from token ids to text. The text of special tokens is in it, and it is not
    cleaned up: that would change text that was already shown. Ids unknown to the tokenizer have no
    text.

    Hugging Face's `decode` first examines the type of its argument, which takes three times as long
    as decoding. If the class of the tokenizer would do nothing else, this function calls the
    library below it directly.
    """
    own = [getattr(type(tokenizer), name) for name in ("decode", "_decode")]
    usual = [PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode]
    if isinstance(tokenizer, PreTrainedTokenizerFast) and own == usual:
        return functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)

    def decode(token_ids: list[int]) -> str:
        try:
            text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        except Exception:  # tokenizers in Python may fail at an id that is not in their vocabulary
            known = [token_id for token_id in token_ids if token_id in vocabulary(tokenizer)]
            text = tokenizer.decode(known, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


@functools.lru_cache(maxsize=8)
def vocabulary(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The token ids that the tokenizer knows. A model may have more."""
    return frozenset(tokenizer.get_vocab().values())


@functools.lru_cache(maxsize=8)
def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that `skip_special_tokens` leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)
