"""`HiRadixCache`: a radix tree that continues in host memory. Plain Python data, no tensors.

    tree        root ── a b c ── d e                     pages of the pool
    copies      a b c d e   a b c x y z                  pages of the host pool

Each copy has a key: a hash of all tokens up to the end of its page. Before a page leaves the tree,
its whole prefix is copied to the host. A request that matches `a b c` in the tree finds `x y z` by
their keys, and copies them back. The copy stream runs the transfers in the order of their list.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .radix_cache import RadixCache, TreeNode

NEWEST_SHARE = 0.2  # of the newest step in the average of `token_seconds`


class Transfer(NamedTuple):
    """A copy of one page between the two pools."""

    page: int  # in the pool of the device
    host_page: int
    to_host: bool


@dataclass
class SwapCosts:
    """Predicts whether a page comes back faster from the host than by recomputation.

    page_seconds: to copy a page, measured when the engine starts. token_seconds: to compute a
    token, an average over the steps that computed prompts. None before the first: pages are copied.
    """

    page_size: int
    page_seconds: float = 0.0
    token_seconds: float | None = None

    def is_copy_cheaper(self, num_copies: int) -> bool:
        """Return whether `num_copies` copies of a page take less time than computing its tokens."""
        known = self.token_seconds
        return known is None or num_copies * self.page_seconds < self.page_size * known

    def observe(self, num_tokens: int, begin: float, end: float) -> None:
        """Update the average with a step that computed `num_tokens` tokens, mainly of prompts."""
        newest = (end - begin) / num_tokens
        known = self.token_seconds or newest
        self.token_seconds = known + NEWEST_SHARE * (newest - known)


class HiRadixCache(RadixCache):
    """I3: each host page is free, or it is the copy of one page of tokens."""

    def __init__(self, page_size: int, num_host_pages: int = 0) -> None:
        super().__init__(page_size)
        self.copies: OrderedDict[bytes, int] = OrderedDict()  # by key; least recently used first
        self.resize_host(num_host_pages)
        self.transfers: list[Transfer] = []  # not started yet, oldest first
        self.costs = SwapCosts(page_size)
        self.num_written = self.num_loaded = 0  # pages

    def resize_host(self, num_host_pages: int) -> None:
        """Drop all copies. From now on, there are that many host pages."""
        self.copies.clear()
        self.num_host_pages = num_host_pages
        self.free_host_pages = list(range(num_host_pages - 1, -1, -1))

    def back_up(self, node: TreeNode) -> None:
        """Copy the pages of a prefix that have no copy to the host, if that is worth its time.

        A full host pool drops copies of other prefixes, least recently used first. If all copies
        are of this prefix, the rest of the prefix gets no copy.
        """
        tokens = [token for part in node.path() for token in part.tokens]
        pages = dict(zip(page_keys(tokens, self.page_size), node.prefix_pages(), strict=True))
        missing = [key for key in pages if key not in self.copies]
        self._touch(pages)
        for key in missing if self.costs.is_copy_cheaper(num_copies=2) else []:
            if not self.free_host_pages:
                if not self.copies or next(iter(self.copies)) in pages:
                    break
                self.free_host_pages.append(self.copies.popitem(last=False)[1])
            self.copies[key] = self.free_host_pages.pop()
            self.transfers.append(Transfer(pages[key], self.copies[key], to_host=True))
            self.num_written += 1
        self._touch(pages)

    def take_copies(self, token_ids: Sequence[int], start: int, most: int) -> dict[bytes, int]:
        """Take the copies of up to `most` pages after the first `start` pages of `token_ids`.

        Return none if computing the tokens is faster. The copies that are returned cannot be
        dropped before the caller has allocated pages of the device and called `load`.
        """
        keys = page_keys(token_ids, self.page_size)[start:][:most]
        found = next((i for i, key in enumerate(keys) if key not in self.copies), len(keys))
        found = found if self.costs.is_copy_cheaper(num_copies=1) else 0
        return {key: self.copies.pop(key) for key in keys[:found]}

    def load(self, copies: dict[bytes, int], pages: Sequence[int]) -> None:
        """Copy the host pages that `take_copies` returned to pages of the device."""
        for host_page, page in zip(copies.values(), pages, strict=True):
            self.transfers.append(Transfer(page, host_page, to_host=False))
        self.num_loaded += len(copies)
        self.copies.update(copies)
        self._touch(copies)

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers since the last call. They must be started now, in this order."""
        transfers, self.transfers = self.transfers, []
        return transfers

    def check_host(self) -> None:
        """Raise `AssertionError` if a host page has no place, or two places."""
        everything = sorted([*self.copies.values(), *self.free_host_pages])
        assert everything == list(range(self.num_host_pages)), f"I3: host pages are {everything}"

    def _shorten(self, leaf: TreeNode, most: int) -> list[int]:
        self.back_up(leaf)
        return super()._shorten(leaf, most)

    def _touch(self, keys: Sequence[bytes] | dict[bytes, int]) -> None:
        """Mark copies as used. The first page of a prefix is dropped last."""
        for key in reversed(keys):
            if key in self.copies:
                self.copies.move_to_end(key)


def page_keys(token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Return the key of each whole page: a hash of its tokens, and of the key before it."""
    keys, key = list[bytes](), b""
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        tokens = array("q", token_ids[start : start + page_size]).tobytes()
        key = hashlib.sha256(key + tokens).digest()
        keys.append(key)
    return keys
