"""`HiRadixCache`: a radix tree that continues in host memory. Plain Python data, no tensors.

    tree        root ── a b c ── d e                     pages of the pool
    copies      a b c d e   a b c x y z                  pages of the host pool

Each page of the host pool has a key: a hash of all tokens up to the end of the page. Before pages
leave the tree, their whole prefix is copied to the host, so a copy never lacks the pages before it.
A request that matches `a b c` in the tree finds `x y z` by their keys, and copies them back.

The class lists the copies as transfers, in an order in which they are right one after the other.
The copy stream keeps this order. SGLang's class has the same name, and keeps the numbers of host
pages in the nodes of the tree. vLLM's offloading connector finds them by hashes, as here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from .costs import SwapCosts
from .radix_cache import RadixCache, TreeNode


class Transfer(NamedTuple):
    """A copy of one page between the two pools."""

    page: int  # in the pool of the device
    host_page: int
    to_host: bool


class HiRadixCache(RadixCache):
    """I3: each host page is free, or it is the copy of one page of tokens."""

    def __init__(self, page_size: int, num_host_pages: int) -> None:
        super().__init__(page_size)
        self.num_host_pages = num_host_pages
        self.free_host_pages = list(range(num_host_pages - 1, -1, -1))
        self.copies: OrderedDict[bytes, int] = OrderedDict()  # by key; least recently used first
        self.transfers: list[Transfer] = []  # that have not been started, oldest first
        self.costs = SwapCosts(page_size)
        self.num_written = self.num_loaded = 0  # pages

    def back_up(self, node: TreeNode) -> None:
        """Copy a prefix to the host, as far as it has no copy, if that is worth its time.

        If the host pool is full, other copies are dropped, least recently used first. If only this
        prefix is left in it, the rest of the prefix gets no copy.
        """
        tokens = [token for part in node.path() for token in part.tokens]
        pages = dict(zip(page_keys(tokens, self.page_size), node.prefix_pages(), strict=True))
        missing = [key for key in pages if key not in self.copies]
        self._touch(pages)
        if not missing or not self.costs.is_copy_cheaper(len(missing), num_copies=2):
            return
        for key in missing:
            if not self.free_host_pages:
                if not self.copies or next(iter(self.copies)) in pages:
                    break
                self.free_host_pages.append(self.copies.popitem(last=False)[1])
            self.copies[key] = self.free_host_pages.pop()
            self.transfers.append(Transfer(pages[key], self.copies[key], to_host=True))
            self.num_written += 1
        self._touch(pages)

    def take_copies(self, token_ids: Sequence[int], start: int, most: int) -> dict[bytes, int]:
        """Take the copies of up to `most` pages behind the first `start` pages of `token_ids`.

        The result is empty if computing them is faster. The caller frees memory of the device,
        which may drop other copies, and then calls `load`.
        """
        keys = page_keys(token_ids, self.page_size)[start:][:most]
        found = next((i for i, key in enumerate(keys) if key not in self.copies), len(keys))
        if found and self.costs.is_copy_cheaper(found, num_copies=1):
            return {key: self.copies.pop(key) for key in keys[:found]}
        return {}

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

    def clear(self) -> list[int]:
        """Remove all copies, and all unlocked pages of the tree. Return these pages."""
        self.free_host_pages += self.copies.values()
        self.copies.clear()
        unused, self.free_host_pages = self.free_host_pages, []  # so that nothing is backed up
        pages = self.evict(self.evictable_size)
        self.free_host_pages = unused
        return pages

    def check_host(self) -> None:
        """Raise `AssertionError` if a host page has no place, or two places."""
        everything = sorted([*self.copies.values(), *self.free_host_pages])
        assert everything == list(range(self.num_host_pages)), (
            f"I3: copies {sorted(self.copies.values())} and free pages "
            f"{sorted(self.free_host_pages)} are not the {self.num_host_pages} host pages"
        )

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
