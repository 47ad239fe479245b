"""`SwapCosts`: predicts whether pages come back faster from host memory than by recomputation."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST_SHARE = 0.2  # of the newest step in the average


@dataclass
class SwapCosts:
    """Two costs that grow with the number of pages. Times are in seconds.

    copy_seconds: what each copy takes in addition to its pages. page_seconds: for each page.
    `HostPool` measures both when the engine starts. token_seconds: to compute a token of a prompt,
    an average over the steps that computed prompts. None before the first one: then pages are kept.
    """

    page_size: int
    copy_seconds: float = 0.0
    page_seconds: float = 0.0
    token_seconds: float | None = None

    def is_copy_cheaper(self, num_pages: int, num_copies: int) -> bool:
        """Return whether copying pages `num_copies` times takes less time than their tokens do."""
        if self.token_seconds is None:
            return True
        copying = num_copies * (self.copy_seconds + num_pages * self.page_seconds)
        return copying < num_pages * self.page_size * self.token_seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step that computed so many tokens, most of them of prompts."""
        newest = seconds / num_tokens
        known = newest if self.token_seconds is None else self.token_seconds
        self.token_seconds = known + NEWEST_SHARE * (newest - known)
