"""Checks of prompts and messages that refuse bad input (I4), for `InputProcessor`."""

from __future__ import annotations

import functools
import operator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..validation import require_list, require_text, shown


def check_messages(messages: Any) -> None:
    """Raise `ValueError` unless `messages` is one conversation: a list of messages."""
    require_list("messages", messages, "messages")
    if not messages:
        raise ValueError("messages must not be empty")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"messages must be dicts with 'role' and 'content', got {shown(message)}"
            )
        require_text("messages: role", message["role"])
        if not isinstance(message["content"], str):
            raise ValueError(f"messages: content must be a string, got {shown(message['content'])}")


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the longest token in the vocabulary."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def as_token_id(token: Any) -> int:
    """Return a token id as an `int`. Raises `ValueError` for anything else."""
    if not isinstance(token, bool):
        try:
            return operator.index(token)
        except Exception:  # arrays and tensors raise exceptions of various classes
            pass
    raise ValueError(f"prompt must hold token ids, got {shown(token)}")
