"""Attention through a page table, called by the Hugging Face model in each layer.

The model runs on one flat batch `[1, T]`; which token belongs to whom, and where its past lies,
comes along as `AttentionMetadata`. The functions here are plain torch: the reference for the
functions of the same names and signatures in `triton_ops.py` and `cpu_ops.py`, and what runs where
neither of them can.

    tokens         | a | b | c | d0 d1 d2 d3 | e0 e1 |        a, b, c decode; d and e are chunks
    query_starts     0   1   2   3             7       9
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from common import UnsupportedModelError
from common.shared_model import attention_switched

from .kv_pool import KVPool

# The name under which Hugging Face knows `paged_attention`. Registration is global, so each package
# has its own name.
NAME = f"ladder_{__package__}"
GATHER_SLOTS = 4096  # slots that are gathered at once
QUERY_BLOCK = 256  # queries of a chunk that share a mask: it stays small for any prompt


@dataclass
class DecodeGroup:
    """Decodes of similar context, whose keys and values are gathered together."""

    rows: torch.Tensor | None  # [n] which of the decodes; None: all, in their order
    slots: torch.Tensor  # [n, S] where their contexts lie
    bias: torch.Tensor  # [n, 1, 1, S] float32: 0 where a decode may look, else -inf
    _lines: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, memory: torch.Tensor) -> torch.Tensor:
        """Keys or values of a layer, [kv_heads, pages, page_size, head_dim], for these decodes:
        [n, kv_heads, S, head_dim]. Whole lines are copied; layers with as many heads have them in
        the same places."""
        heads, head_dim = memory.shape[0], memory.shape[-1]
        memory = memory.view(-1, head_dim)  # [kv_heads * slots, head_dim]
        if heads not in self._lines:
            starts = torch.arange(0, len(memory), len(memory) // heads, device=memory.device)
            self._lines[heads] = (self.slots[:, None] + starts[:, None]).flatten()
        lines = memory.index_select(0, self._lines[heads])
        return lines.view(len(self.slots), heads, -1, head_dim)


@dataclass
class AttentionMetadata:
    """Where the tokens of one step lie. B requests, T tokens, P pages in the widest row."""

    slot_mapping: torch.Tensor  # [T] int64: where each token's keys and values go
    query_starts: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32: tokens of each request up to its last one here
    page_table: torch.Tensor  # [B, P] int32
    page_size: int
    num_decodes: int  # the first so many requests have one token each
    num_tokens: list[int]  # [B] of each request, on the host
    contexts: list[int]  # [B] `seq_lens`, on the host

    @functools.cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decodes by context, so many in a group that one gather stays in the CPU's cache."""
        if self.num_decodes * max(self.contexts[: self.num_decodes]) <= GATHER_SLOTS:
            return [self._decode_group(None)]
        groups: list[list[int]] = [[]]
        for row in sorted(range(self.num_decodes), key=self.contexts.__getitem__):
            if groups[-1] and (len(groups[-1]) + 1) * self.contexts[row] > GATHER_SLOTS:
                groups.append([])
            groups[-1].append(row)
        return [self._decode_group(rows) for rows in groups]

    def _decode_group(self, rows: list[int] | None) -> DecodeGroup:
        """Behind a context, its first slot again: nobody has written what lies there, and even
        masked, a NaN would spread."""
        members = range(self.num_decodes) if rows is None else rows
        positions = self._positions(max(self.contexts[row] for row in members))
        index = torch.tensor(members, device=positions.device)
        seen = positions < self.seq_lens[index, None]  # [n, S]
        positions = torch.where(seen, positions, 0)
        pages = self.page_table[index].gather(1, positions // self.page_size)
        slots = pages.long() * self.page_size + positions % self.page_size
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        return DecodeGroup(None if rows is None else index, slots, bias[:, None, None])

    @functools.cached_property
    def chunk_slots(self) -> list[torch.Tensor]:
        """Slots of each chunk's context, its prefix and itself: [context]."""
        slots = []
        for row in range(self.num_decodes, len(self.contexts)):
            positions = self._positions(self.contexts[row])
            pages = self.page_table[row, positions // self.page_size].long()
            slots.append(pages * self.page_size + positions % self.page_size)
        return slots

    def _positions(self, length: int) -> torch.Tensor:
        return torch.arange(length, device=self.page_table.device)


@dataclass
class PagedBatch:
    """What travels through the model to `paged_attention`: the memory, the batch, the kernels."""

    pool: KVPool
    metadata: AttentionMetadata
    ops: ModuleType  # with `store_kv`, `paged_decode`, `paged_prefill`


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    paged: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as Hugging Face calls it.

    query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim], of the new tokens.
    Stores key and value in their pages, then attends to the pages. Returns [1, T, heads, head_dim].
    """
    if paged is None:
        raise UnsupportedModelError("the model does not pass its keyword arguments to attention")
    meta, ops = paged.metadata, paged.ops
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = paged.pool.keys[layer], paged.pool.values[layer]
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    ops.store_kv(keys, values, key, value, meta)
    if meta.num_decodes == len(meta.contexts):
        output = ops.paged_decode(query, keys, values, meta, scale)
    elif meta.num_decodes == 0:
        output = ops.paged_prefill(query, keys, values, meta, scale)
    else:
        decodes, chunks = query[: meta.num_decodes], query[meta.num_decodes :]
        output = torch.cat(
            [
                ops.paged_decode(decodes, keys, values, meta, scale),
                ops.paged_prefill(chunks, keys, values, meta, scale),
            ]
        )
    return output.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)


def use_paged_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Return a context in which the model calls `paged_attention`. It holds the model's lock."""
    return attention_switched(model, NAME)


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: AttentionMetadata,
) -> None:
    """Write key and value [T, kv_heads, head_dim] to their slots of a layer's memory."""
    keys.flatten(1, 2).index_copy_(1, meta.slot_mapping, key.transpose(0, 1))
    values.flatten(1, 2).index_copy_(1, meta.slot_mapping, value.transpose(0, 1))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """One query for each decoding request: [decodes, heads, head_dim], returns the same shape.

    One gather for each group of requests, as long as its longest context. The query heads that
    share a KV head are the queries of one attention, so keys and values are not repeated.
    """
    num_kv_heads, batch, heads = keys.shape[0], query.shape[0], query.shape[1]
    grouped = query.reshape(batch, num_kv_heads, heads // num_kv_heads, -1)
    outputs = []
    for group in meta.decode_groups:
        q = grouped if group.rows is None else grouped.index_select(0, group.rows)
        k, v = group.gather(keys), group.gather(values)  # [n, kv_heads, S, head_dim]
        bias = group.bias.to(query.dtype)
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale))
    if len(outputs) == 1:
        return outputs[0].reshape(batch, heads, -1)
    order = torch.cat([group.rows for group in meta.decode_groups if group.rows is not None])
    output = query.new_empty(*grouped.shape[:-1], values.shape[-1])
    return output.index_copy_(0, order, torch.cat(outputs)).reshape(batch, heads, -1)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """The queries of all chunks, [tokens, heads, head_dim]: each sees its request up to itself."""
    repeats = query.shape[1] // keys.shape[0]
    outputs, start = [], 0
    chunks = zip(meta.num_tokens[meta.num_decodes :], meta.chunk_slots, strict=True)
    for num_tokens, slots in chunks:
        q = query[start : start + num_tokens].transpose(0, 1)  # [heads, n, head_dim]
        k, v = (
            memory.flatten(1, 2).index_select(1, slots).repeat_interleave(repeats, dim=0)
            for memory in (keys, values)
        )  # [heads, context, head_dim]
        outputs.append(_causal(q[None], k[None], v[None], scale)[0].transpose(0, 1))
        start += num_tokens
    return torch.cat(outputs)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last n of S tokens attend to all up to themselves: q [1, heads, n, head_dim]."""
    num_queries, context = q.shape[2], k.shape[2]
    if num_queries == context:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    outputs = []
    positions = torch.arange(context, device=q.device)
    for start in range(0, num_queries, QUERY_BLOCK):
        block = q[:, :, start : start + QUERY_BLOCK]
        first = context - num_queries + start
        end = first + block.shape[2]
        mask = positions[:end] <= positions[first:end, None]  # [block, end]
        outputs.append(
            scaled_dot_product_attention(
                block, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale
            )
        )
    return torch.cat(outputs, dim=2)
