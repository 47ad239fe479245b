"""Decode steps over a Hugging Face cache: with room to grow, and with attention in C.

`past_key_values` stays the cache that it is, and Hugging Face's own code reads it as before. On a
CPU, two operations of each layer are replaced where a replacement gives the same result:

    append            `DynamicLayer` joins old and new keys to a new tensor, so each step copies the
                      whole cache. Here the tensor has room after its last token, so a step copies
                      only the new tokens.
    CacheAttention    with one query per request, the kernel that reads pages (`attention.c`) reads
                      the cache: each row of the cache is one page.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .. import cpu_attention
from ..cpu_kernels import BatchLayout

ROOM = 256  # a tensor that is full gets room for this many more tokens
HIDDEN = -1e30  # an additive mask hides a key by a number below this one


def append(
    cache: Any, key: torch.Tensor, value: torch.Tensor, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store new keys and values, [B, kv_heads, T, head_dim], in a layer of a cache.

    Returns what the layer attends to: for a `DynamicCache`, all keys and values. The caller may
    overwrite `key` and `value` afterwards.
    """
    layers = cache.layers if type(cache) is DynamicCache else []
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if type(layer) is DynamicLayer and layer.is_initialized:
        tensors = vars(layer).setdefault("tensors", (_GrowingTensor(), _GrowingTensor()))
        keys, values = tensors[0].append(layer.keys, key), tensors[1].append(layer.values, value)
        if keys is not None and values is not None:
            layer.keys, layer.values = keys, values
            return keys, values
    stored: tuple[torch.Tensor, torch.Tensor]
    stored = cache.update(key.clone(), value.clone(), layer_idx)
    return stored


class _GrowingTensor:
    """The keys or the values of a layer, in a tensor with room after the last token."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None  # [B, kv_heads, tokens and room, head_dim]
        self.view: torch.Tensor | None = None  # [B, kv_heads, tokens, head_dim]: the layer has it

    def append(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """Return old and new tokens in one tensor; None if Hugging Face must join them.

        If `old` is not the latest result, its memory may have another owner, for example after
        `crop` or in a copy of the cache. Then it is copied first, so nothing of it is overwritten.
        """
        if old.dim() != 4 or _kind(old) != _kind(new) or new.requires_grad or not new.is_cpu:
            return None
        (batch, kv_heads, start, head_dim), count = old.shape, new.shape[2]
        memory = self.memory
        if memory is None or old is not self.view or not _is_writable(memory, start + count):
            memory = old.new_empty((batch, kv_heads, start + count + ROOM, head_dim))
            memory.narrow(2, 0, start).copy_(old)
            self.memory = memory
        memory.narrow(2, start, count).copy_(new)
        self.view = memory.narrow(2, 0, start + count)
        return self.view


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors must have in common to become one."""
    batch, kv_heads, _, head_dim = x.shape
    return batch, kv_heads, head_dim, x.dtype, x.device, x.requires_grad


def _is_writable(memory: torch.Tensor, tokens: int) -> bool:
    """Return whether the memory has room, and torch lets this thread write to it."""
    return memory.shape[2] >= tokens and torch.is_inference_mode_enabled() >= memory.is_inference()


class CacheAttention:
    """Hugging Face's attention function "sdpa" for one forward: decode steps are computed in C."""

    def __init__(self) -> None:
        """The kernels must be runnable (`cpu_attention.is_runnable`)."""
        self._mask: torch.Tensor | None = None
        self._shape: tuple[int, int] | None = None
        self._layout: BatchLayout | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with queries, [B, heads, T, head_dim]. Returns [B, T, heads, head_dim].

        key, value: [B, kv_heads, S, head_dim].
        """
        if query.shape[2] == 1 and _is_readable(query, key, value):
            layout = self.layout_of(attention_mask, (key.shape[0], key.shape[2]))
            if layout is not None:
                q, keys, values = query.squeeze(2), key.transpose(0, 1), value.transpose(0, 1)
                return cpu_attention.decode(q, keys, values, layout, scaling).unsqueeze(1), None
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended, None

    def layout_of(self, mask: torch.Tensor | None, shape: tuple[int, int]) -> BatchLayout | None:
        """Return the contexts of the requests; None if the mask hides a key before a seen one.

        shape: B and S of the keys. Usually all layers of the forward have the same mask and shape.
        """
        if self._shape != shape or self._mask is not mask:
            self._mask, self._shape = mask, shape
            lengths = _lengths(mask, *shape)
            self._layout = None if lengths is None else _layout(lengths)
        return self._layout


def _is_readable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel can read keys and values of these queries: rows are pages."""
    distances = _distances(key)
    same = query.dtype == key.dtype == value.dtype and len(query) == len(key)
    return same and distances is not None and distances == _distances(value)


def _distances(x: torch.Tensor) -> tuple[int, int] | None:
    """Return the distances of rows and heads, in tokens, if the kernel can read keys or values."""
    row, head, token, number = x.stride()
    usual = (token, number) == (x.shape[3], 1) and row % token == head % token == 0
    return (row // token, head // token) if usual and row >= x.shape[2] * token else None


def _lengths(mask: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor | None:
    """Return how many of the first keys each request sees, [B] int32."""
    if mask is None:
        return torch.full((batch,), tokens, dtype=torch.int32)
    if mask.shape != (batch, 1, 1, tokens):
        return None
    mask = mask[:, 0, 0]
    seen = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~seen if mask.dtype == torch.bool else mask < HIDDEN
    lengths = seen.sum(1, dtype=torch.int32)
    first = torch.arange(tokens) < lengths[:, None]
    usual = torch.equal(seen, first) and torch.equal(hidden, ~first) and bool(lengths.all())
    return lengths if usual else None


def _layout(lengths: torch.Tensor) -> BatchLayout:
    """Return the layout of requests with one token each. Row i is the only page of request i."""
    rows = torch.arange(len(lengths) + 1, dtype=torch.int32)
    unused = torch.zeros(len(lengths), dtype=torch.int64)  # slots: the cache has stored the tokens
    return BatchLayout.of(rows[:-1, None], rows, lengths, unused)
