"""A random batch over a poisoned KV pool, to compare kernels with their torch versions."""

from __future__ import annotations

from types import ModuleType

import torch

SCALE = 0.25
OUT_OF_RANGE = 2**30  # a page id that does not exist: reading through it fails


class PagedCase:
    """Requests with a context and some new tokens each. Every slot without a token holds NaN.

    contexts: the tokens of each request up to its last one. counts: how many of them are new.
    Requests with one new token come first. heads: the number of query heads and of KV heads.
    """

    def __init__(
        self,
        attention: ModuleType,
        contexts: list[int],
        counts: list[int],
        heads: tuple[int, int] = (4, 2),
        dim: int = 32,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.attention = attention
        chance = torch.Generator().manual_seed(sum(contexts) + dim + page_size)
        num_heads, num_kv_heads = heads
        pages = [-(-context // page_size) for context in contexts]
        order = (1 + torch.randperm(sum(pages) + 3, generator=chance)).tolist()
        table = torch.full((len(contexts), max(pages) + 1), OUT_OF_RANGE, dtype=torch.int32)
        for row, count in enumerate(pages):
            table[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
            del order[:count]

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance).to(dtype)

        shape = (num_kv_heads, sum(pages) + 4, page_size, dim)
        keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        new_slots: list[int] = []
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            positions = torch.arange(context)
            slots = table[row, positions // page_size].long() * page_size + positions % page_size
            old = slots[: context - count]
            for memory in (keys, values):
                memory.flatten(1, 2)[:, old] = random(num_kv_heads, len(old), dim)
            new_slots += slots[context - count :].tolist()
        tokens = sum(counts)
        self.keys, self.values = keys.to(device), values.to(device)
        self.query = random(tokens, num_heads, dim).to(device)
        self.key = random(tokens, num_kv_heads, dim).to(device)
        self.value = random(tokens, num_kv_heads, dim).to(device)
        self.meta = attention.AttentionMetadata(
            slot_mapping=torch.tensor(new_slots, device=device),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int().to(device),
            seq_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            page_table=table.to(device),
            page_size=page_size,
            num_decodes=next((i for i, n in enumerate(counts) if n > 1), len(counts)),
            query_lens_cpu=counts,
            seq_lens_cpu=contexts,
        )

    def run(self, ops: ModuleType, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Store the new tokens, then run attention. Returns [T, heads, dim]."""
        query, key, value, keys, values = (
            x.to(dtype or x.dtype).clone()
            for x in (self.query, self.key, self.value, self.keys, self.values)
        )
        ops.store_kv(keys, values, key, value, self.meta)
        n, parts = self.meta.num_decodes, []
        if n:
            parts.append(ops.paged_decode(query[:n], keys, values, self.meta, SCALE))
        if n < len(self.meta.seq_lens_cpu):
            parts.append(ops.paged_prefill(query[n:], keys, values, self.meta, SCALE))
        return torch.cat(parts)

    def error(self, ops: ModuleType) -> float:
        """Return the relative error of `ops` against torch in float64. NaN never passes."""
        expected = self.run(self.attention, torch.float64)
        got = self.run(ops)
        assert not expected.isnan().any(), "the torch version reads a slot that was never written"
        assert got.dtype == self.query.dtype
        return float((got.double() - expected).norm() / expected.norm())

    @property
    def tolerance(self) -> float:
        """The largest relative error that the type allows."""
        return 1e-5 if self.query.dtype == torch.float32 else 1e-2
