"""What users give to an engine as a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TokensPrompt(NamedTuple):
    """A prompt that is already tokenized, and optionally its text."""

    prompt_token_ids: list[int]
    prompt: str | None = None


Prompt = str | Sequence[int] | TokensPrompt
Message = dict[str, str]
