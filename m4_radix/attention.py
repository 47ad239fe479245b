"""Attention through a page table. The Hugging Face model calls it in each layer.

The model runs on one flat batch `[1, T]`. `AttentionMetadata` says which request each token belongs
to, and where the earlier tokens of the request lie. The functions here are plain torch. They are
the reference for the functions with the same names and signatures in `triton_ops.py` and in
`common/fast/cpu_attention.py`, and they run where neither can, or if `readable` is set.

    tokens            | a | b | c | d0 d1 d2 d3 | e0 e1 |        a, b, c decode; d, e are chunks
    query_start_loc     0   1   2   3             7       9
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
from common.hf.shared import attention_switched

from .kv_pool import KVPool

# The name of `paged_attention` in Hugging Face's registry. The registry is global, so each package
# registers its own name.
NAME = f"ladder_{__package__}"
GATHER_SLOTS = 4096  # slots that one gather copies
QUERY_BLOCK = 256  # queries of a chunk that share a mask, so that the mask stays small


@dataclass
class DecodeGroup:
    """Decodes of similar length, with keys and values that are gathered together."""

    rows: torch.Tensor | None  # [n] indices of the decodes; None: all of them
    slots: torch.Tensor  # [n, S] slots of their contexts
    bias: torch.Tensor  # [n, 1, 1, S] float32: 0 for visible slots, else -inf
    _lines: dict[int, torch.Tensor] = field(default_factory=dict)

    def gather(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the keys or values of these decodes, [n, kv_heads, S, head_dim].

        memory: those of a layer, [kv_heads, pages, page_size, head_dim]. Whole lines of `head_dim`
        are copied. Layers with the same number of heads use the same line numbers.
        """
        heads, head_dim = memory.shape[0], memory.shape[-1]
        memory = memory.view(-1, head_dim)  # [kv_heads * slots, head_dim]
        if heads not in self._lines:
            starts = torch.arange(0, len(memory), len(memory) // heads, device=memory.device)
            self._lines[heads] = (self.slots[:, None] + starts[:, None]).flatten()
        lines = memory.index_select(0, self._lines[heads])
        return lines.view(len(self.slots), heads, -1, head_dim)


@dataclass
class AttentionMetadata:
    """Where the tokens of one step lie: B requests, T tokens, P pages in the widest row."""

    slot_mapping: torch.Tensor  # [T] int64: the slot for each token's keys and values
    query_start_loc: torch.Tensor  # [B + 1] int32: the first token of each request, and T
    seq_lens: torch.Tensor  # [B] int32: tokens of each request up to its last one in this step
    page_table: torch.Tensor  # [B, P] int32
    page_size: int
    num_decodes: int  # the first `num_decodes` requests have one token each
    query_lens_cpu: list[int]  # [B] tokens of each request in this step, on the host
    seq_lens_cpu: list[int]  # [B] the same as `seq_lens`, on the host

    @functools.cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """The decodes, grouped by length so that one gather fits in the CPU's cache."""
        if self.num_decodes * max(self.seq_lens_cpu[: self.num_decodes]) <= GATHER_SLOTS:
            return [self._decode_group(None)]
        groups: list[list[int]] = [[]]
        for row in sorted(range(self.num_decodes), key=self.seq_lens_cpu.__getitem__):
            if groups[-1] and (len(groups[-1]) + 1) * self.seq_lens_cpu[row] > GATHER_SLOTS:
                groups.append([])
            groups[-1].append(row)
        return [self._decode_group(rows) for rows in groups]

    def _decode_group(self, rows: list[int] | None) -> DecodeGroup:
        """Return the group of some decodes. Behind a context, its first slot is used again.

        The slots after a context were perhaps never written: even masked, a NaN would spread.
        """
        members = range(self.num_decodes) if rows is None else rows
        positions = self._positions(max(self.seq_lens_cpu[row] for row in members))
        index = torch.tensor(members, device=positions.device)
        seen = positions < self.seq_lens[index, None]  # [n, S]
        positions = torch.where(seen, positions, 0)
        pages = self.page_table[index].gather(1, positions // self.page_size)
        slots = pages.long() * self.page_size + positions % self.page_size
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
        return DecodeGroup(None if rows is None else index, slots, bias[:, None, None])

    @functools.cached_property
    def chunk_slots(self) -> list[torch.Tensor]:
        """For each chunk, the slots of its whole context, [context]: its prefix and itself."""
        slots = []
        for row in range(self.num_decodes, len(self.seq_lens_cpu)):
            positions = self._positions(self.seq_lens_cpu[row])
            pages = self.page_table[row, positions // self.page_size].long()
            slots.append(pages * self.page_size + positions % self.page_size)
        return slots

    def _positions(self, length: int) -> torch.Tensor:
        return torch.arange(length, device=self.page_table.device)


@dataclass
class PagedBatch:
    """What the model passes on to `paged_attention`: the memory, the batch, the kernels."""

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
    """Compute the attention of one layer. Hugging Face calls this function.

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
    if meta.num_decodes == len(meta.seq_lens_cpu):
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
    """Write key and value [T, kv_heads, head_dim] to their slots in a layer's memory."""
    keys.flatten(1, 2).index_copy_(1, meta.slot_mapping, key.transpose(0, 1))
    values.flatten(1, 2).index_copy_(1, meta.slot_mapping, value.transpose(0, 1))


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
) -> torch.Tensor:
    """Attend with one query per decoding request. Query and result: [decodes, heads, head_dim].

    There is one gather for each group of requests, as long as the group's longest context. The
    query heads that share a KV head are the queries of one attention, so that keys and values need
    not be repeated.
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
    """Attend with the queries of all chunks. Query and result: [tokens, heads, head_dim].

    Each query sees its own request up to its own position.
    """
    repeats = query.shape[1] // keys.shape[0]
    outputs, start = [], 0
    chunks = zip(meta.query_lens_cpu[meta.num_decodes :], meta.chunk_slots, strict=True)
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
    """Let the last n of S tokens attend up to themselves: q [1, heads, n, head_dim]."""
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
