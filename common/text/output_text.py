"""The text of an output: detokenized token by token, and searched for stop strings (I6).

The text never shows half a character, or the start of a stop string.

A token stands for some bytes, and a character may need several tokens. Decoding the whole output
again for each token would take quadratic time. Decoding each token alone would break characters,
and would lose the spaces that some tokenizers only write between tokens. So the detokenizer decodes
the new tokens together with the last few tokens that were already shown (the context), and then
removes the text that the context alone decodes to:

    tokens   t4  t5 | t6        window = t4 t5 t6; the first two are context
    text     the qu | ick       the first `shown` characters were returned before

Most tokenizers of today are byte-level: the bytes of a token never depend on its neighbours. Then a
token of whole characters needs no context and no decoding. Its text is looked up in a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..sampling.params import SamplingParams

REPLACEMENT = "\ufffd"  # the decoder writes it for bytes that are no character, or not yet one
MAX_MISSING = 3  # a character has at most 4 bytes, and a token at least 1
MAX_WINDOW = 16  # tokens


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


class IncrementalDetokenizer:
    """Converts a growing list of tokens to a growing text.

    With a byte-level tokenizer, the pieces joined together equal `tokenizer.decode(all tokens)`.
    The work per token is constant, even if invalid bytes never end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self.decode = decoder_of(tokenizer)
        self.skipped = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self.pieces = pieces_of(tokenizer)
        self.window: list[int] = []
        self.num_context = 0  # tokens at the start of the window that are context
        self.text = ""  # the decoded window
        self.shown = 0  # characters of `text` that were already returned

    def append(self, token_id: int) -> str:
        """Add a token; return the new text that later tokens cannot change. It may be empty."""
        if token_id in self.skipped:
            return ""
        if self.pieces is not None and not self.window:
            piece = self.pieces[token_id]
            if piece is not None:
                return piece
        self.window.append(token_id)
        self.text = self.decode(self.window)
        if not self.text.endswith(REPLACEMENT):
            piece = self.text[self.shown :]
            self._start_window(self.window[self.num_context :])
            return piece
        if len(self.window) - self.num_context <= MAX_MISSING:
            return ""  # these may be the first bytes of a character
        # So many tokens cannot all belong to one character: some of their bytes are invalid.
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
        """Return the text that was held back, because the output ended inside a character."""
        piece = self.text[self.shown :]
        self.shown = len(self.text)
        return piece

    def _start_window(self, context: list[int]) -> None:
        """Start a new window with the tokens of the last piece as context.

        Called when all text is shown, up to the end of a character.
        """
        if self.pieces is not None:  # no token changes the text of another: no context is needed
            self.window, self.text, self.shown, self.num_context = [], "", 0, 0
            return
        text = self.decode(context)
        if text or len(self.window) >= MAX_WINDOW:
            self.window, self.text, self.shown = context, text, len(text)
        else:
            self.shown = len(self.text)
        self.num_context = len(self.window)

    def _cut_window(self) -> None:
        """Shorten a window of invalid bytes.

        Cut it at a place where both sides, decoded separately, give the same text as together.
        """
        for keep in range(MAX_MISSING, 2 * MAX_MISSING + 1):
            head, tail = self.decode(self.window[:-keep]), self.decode(self.window[-keep:])
            if head + tail == self.text and len(head) <= self.shown:
                self.window, self.text = self.window[-keep:], tail
                self.shown -= len(head)
                self.num_context = 0
                return


class TokenPieces(dict[int, str | None]):
    """The text of each token; None for a token that is not a sequence of whole characters.

    A token is decoded when it is looked up for the first time.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        super().__init__()
        self.decode = decode

    def __missing__(self, token_id: int) -> str | None:
        text = self.decode([token_id])
        self[token_id] = None if REPLACEMENT in text else text
        return self[token_id]


@functools.lru_cache(maxsize=8)
def pieces_of(tokenizer: PreTrainedTokenizerBase) -> TokenPieces | None:
    """Return the table of a byte-level tokenizer.

    None for a tokenizer with tokens that change the text of their neighbours, or that may do so.
    """
    decode = decoder_of(tokenizer)
    if not isinstance(decode, functools.partial):  # the tokenizer adds something to its library
        return None
    is_byte_level = isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    return TokenPieces(decode) if is_byte_level else None


@functools.lru_cache(maxsize=8)
def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    """Return a function that converts token ids to text.

    The text includes special tokens. Spaces in it are not cleaned up, because that would change
    text that was already shown. Token ids that the tokenizer does not know have no text.

    Hugging Face's `decode` first examines the type of its argument, which takes three times as long
    as decoding. If the class of the tokenizer adds nothing else, the returned function calls the
    library below it (`tokenizers`) directly.
    """
    own = [getattr(type(tokenizer), name) for name in ("decode", "_decode")]
    usual = [PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode]
    if isinstance(tokenizer, PreTrainedTokenizerFast) and own == usual:
        return functools.partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)

    def decode(token_ids: list[int]) -> str:
        try:
            text = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        except Exception:  # tokenizers written in Python may fail at an unknown token id
            known = [token_id for token_id in token_ids if token_id in vocabulary(tokenizer)]
            text = tokenizer.decode(known, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    return decode


@functools.lru_cache(maxsize=8)
def vocabulary(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that the tokenizer knows. A model may have more."""
    return frozenset(tokenizer.get_vocab().values())


@functools.lru_cache(maxsize=8)
def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that `skip_special_tokens` leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)
