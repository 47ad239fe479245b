"""4 bits: keys with a scale for each channel of a page, values with a scale for each token.

This computes the answers of the scheme on a whole engine, and saves no memory: pages stay in float.
A query reads the keys of its own page as they are, and those of earlier pages as 4 bits would store
them. So the positions of both tokens alone decide what the query reads (I2).

    page of the key     | 0 | 1 | 2 |                  query in page 2:  packed, packed, float
                                                       query in page 1:  packed, float
"""

from __future__ import annotations

from typing import Any

import torch

STEPS = 15  # between the smallest and the largest number that 4 bits have


def in_4_bits(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the nearest numbers that 4 bits store: 16 numbers from the smallest to the largest.

    dim: the numbers along it share a scale and a zero point, which are stored in float16.
    """
    low = x.amin(dim, keepdim=True).half().float()
    scale = ((x.amax(dim, keepdim=True) - low) / STEPS).half().float()
    steps = ((x - low) / scale.where(scale > 0, 1.0)).round().clamp(0, STEPS)
    return low + steps * scale


def in_4_bits_rotated(x: torch.Tensor) -> torch.Tensor:
    """Round each token's numbers in another basis, in which no channel is larger than the others.

    The basis is a Hadamard matrix, of ones and minus ones: each number of it adds or subtracts all
    channels. x: [..., head_dim], and head_dim a power of two.
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    matrix /= len(matrix) ** 0.5  # now it is its own inverse
    return in_4_bits(x @ matrix, dim=-1) @ matrix


def packed_pages(keys: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return keys [kv_heads, S, head_dim] as full pages store them, channel by channel.

    The last page, if it is not full, stays as it is: only its own queries read it.
    """
    full = keys.shape[1] // page_size * page_size
    pages = keys[:, :full].unflatten(1, (-1, page_size))  # [kv_heads, pages, page_size, head_dim]
    return torch.cat([in_4_bits(pages, dim=2).flatten(1, 2), keys[:, full:]], dim=1)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    packed: torch.Tensor,
    values: torch.Tensor,
    is_own: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend with the last n of S tokens. Query and result: [n, heads, head_dim].

    keys, packed, values: [kv_heads, S, head_dim]. is_own: [n, S], where a query reads `keys`.
    """
    kv_heads, context, num_queries = keys.shape[0], keys.shape[1], query.shape[0]
    q = query.transpose(0, 1).unflatten(0, (kv_heads, -1))  # [kv_heads, group, n, head_dim]
    in_float, in_4 = (q @ x[:, None].transpose(-1, -2) for x in (keys, packed))
    positions = torch.arange(context)
    hidden = positions > positions[context - num_queries :, None]  # [n, S]
    scores = torch.where(is_own, in_float, in_4).mul(scale).masked_fill(hidden, -torch.inf)
    result = scores.softmax(-1) @ values[:, None]  # [kv_heads, group, n, head_dim]
    return result.flatten(0, 1).transpose(0, 1)


class In4Bits:
    """The operations of m5's attention, for `runner.ops`, with keys and values in 4 bits."""

    def __init__(self, attention: Any, scheme: str = "channels") -> None:
        """attention: the module of an engine, which writes to its pages.

        scheme: a scale for each of the `channels` of a page of keys; for each of the `tokens`; or
        for each of the tokens, which are `rotated` first.
        """
        self.attention, self.scheme = attention, scheme

    def store_kv(
        self, keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        meta: Any,
    ) -> None:  # fmt: skip
        """Store the value of a token as 4 bits have it, and the key in float."""
        self.attention.store_kv(keys, values, key, in_4_bits(value, dim=-1), meta)

    def paged_decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: Any, scale: float
    ) -> torch.Tensor:
        """Attend with one query per decoding request: each is a chunk of one token."""
        return self._attend(query, keys, values, meta, scale, range(meta.num_decodes))

    def paged_prefill(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: Any, scale: float
    ) -> torch.Tensor:
        """Attend with the queries of all chunks."""
        chunks = range(meta.num_decodes, len(meta.seq_lens_cpu))
        return self._attend(query, keys, values, meta, scale, chunks)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: Any,
        scale: float, requests: range,
    ) -> torch.Tensor:  # fmt: skip
        outputs, start = [], 0
        for row in requests:
            count, positions = meta.query_lens_cpu[row], torch.arange(meta.seq_lens_cpu[row])
            pages = positions // meta.page_size
            slots = meta.page_table[row, pages].long() * meta.page_size
            slots += positions % meta.page_size
            k, v = (memory.flatten(1, 2)[:, slots] for memory in (keys, values))
            packed = self._packed(k, meta.page_size)
            q, is_own = query[start : start + count], pages == pages[-count:, None]
            outputs.append(attend(q, k, packed, v, is_own, scale))
            start += count
        return torch.cat(outputs)

    def _packed(self, keys: torch.Tensor, page_size: int) -> torch.Tensor:
        if self.scheme == "channels":
            return packed_pages(keys, page_size)
        return in_4_bits_rotated(keys) if self.scheme == "rotated" else in_4_bits(keys, dim=-1)
