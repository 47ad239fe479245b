"""Drafters: they guess the next tokens of a request. A wrong guess costs time, and nothing else."""

from __future__ import annotations

from typing import Protocol

from common import Request


class Drafter(Protocol):
    """Guesses tokens from those of the request, which are all known."""

    def propose(self, request: Request, count: int) -> list[int]:
        """Return at most `count` tokens that may follow. An empty list means no guess."""
        ...


class NGramDrafter:
    """Prompt lookup: what followed the newest tokens when they were in the text before.

    The longest of `sizes` that has an earlier occurrence counts, and of equal ones the latest.

        tokens   the cat sat on the mat . the cat     size 2: "the cat" occurred at 0
        drafts                                  sat on the mat
    """

    def __init__(self, sizes: tuple[int, ...] = (4, 3, 2), window: int = 1024) -> None:
        """sizes: numbers of tokens to look up. window: only that many tokens are searched."""
        self.sizes = sizes
        self.window = window

    def propose(self, request: Request, count: int) -> list[int]:
        tokens = request.token_ids[-self.window :]
        for size in self.sizes:
            newest = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == newest:
                    return tokens[start + size : start + size + count]
        return []
