"""Keys of pages: numbers that name a page of tokens together with all tokens before it.

A replica caches whole pages, so a router that counts in pages predicts a hit exactly. Two prompts
have the same first k keys if and only if their first k pages have the same tokens (up to collisions
of a 64-bit hash). vLLM names its blocks in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

PageKey = int  # 64 bits


def page_keys(token_ids: Sequence[int], page_size: int, parent: PageKey = 0) -> list[PageKey]:
    """Return the key of each whole page of `token_ids`.

    parent: the key of the page before the first one; 0 at the start of a prompt. Keys are the same
    in every process.
    """
    keys, layout = [], struct.Struct(f"<Q{page_size}Q")
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = layout.pack(parent, *token_ids[start : start + page_size])
        parent = int.from_bytes(blake2b(page, digest_size=8).digest(), "little")
        keys.append(parent)
    return keys
