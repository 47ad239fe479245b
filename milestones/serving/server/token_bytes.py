"""`TokenBytes`: the bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common.text.output_text import pieces_of

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token of a tokenizer that is not byte-level


class TokenBytes:
    """The bytes that each token of a vocabulary stands for.

    A token may be a part of a character. Its bytes are then no valid UTF-8.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = pieces_of(tokenizer) is not None
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        added = tokenizer.added_tokens_decoder.items()
        self._added = {token_id: str(token.content) for token_id, token in added}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._is_byte_level:
            return bytes(self._byte_of[character] for character in token)
        if found := BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes spaces like this

    def text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for a part of a character."""
        return self.of(token_id).decode("utf-8", "replace")

    def name(self, token_id: int) -> str:
        """Return the text of a token; for a part of a character, `bytes:` and its bytes."""
        data = self.of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
