"""A small KV cache that tests whether a model works with a cache other than its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

JUNK = 7.0  # the content of slots that no query may read


@dataclass(frozen=True)
class LayerKV:
    """The shape of one layer's keys and values for one token, and what its attention needs.

    `window` and `variants` are known only if the model calls a registered attention function.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # a query sees so many tokens, itself included. None: all
    variants: tuple[str, ...] = ()  # other arguments that change what attention computes


class SlotCache:
    """Keys and values of a few requests, one row for each, used as `past_key_values` of a model.

    The token at position p of a request is in slot p of the request's row. A prefill attends to its
    own keys and values. A decode gets all slots of its row; the attention mask hides the slots that
    it must not read.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.positions = torch.empty(0, 0, dtype=torch.int64)  # [B, T]
        self.context = 0

    def begin_step(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Set the `positions` [B, T] of the tokens of the next forward.

        Returns the attention mask of that forward, [B, 1, T, S], to be added to the scores.
        """
        self.positions, self.context = positions, int(positions.max()) + 1
        slots = torch.arange(self.context, device=positions.device)
        return additive_mask(slots <= positions[:, None, :, None], dtype)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, [B, kv_heads, T, head_dim]; return those to attend to."""
        if key.shape[2] == self.context:  # a prefill
            self.layers[layer_idx] = key, value
            return key, value
        stored = tuple(
            self._stored(old, new)
            for old, new in zip(self.layers[layer_idx], (key, value), strict=True)
        )
        self.layers[layer_idx] = stored[0], stored[1]
        return self.layers[layer_idx]

    def _stored(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return the slots of a layer, [B, heads, S, head_dim], with one more token in each row."""
        batch, heads, length, dim = old.shape
        missing = self.context - length
        memory = torch.cat([old, old.new_full((batch, heads, missing, dim), JUNK)], dim=2)
        memory[torch.arange(batch), :, self.positions[:, 0]] = new[:, :, 0]
        return memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before this forward. Some models ask for it.

        With `position_ids` given, a model must not use the answer.
        """
        return self.context - self.positions.shape[-1]

    def shapes(self) -> list[LayerKV]:
        """Return the shape of each layer. Raises `ValueError` if a layer has not been used."""
        return in_order(
            {i: LayerKV(k.shape[1], k.shape[3], v.shape[3]) for i, (k, v) in self.layers.items()}
        )


def in_order(layers: dict[int, LayerKV]) -> list[LayerKV]:
    """Return the layers by index. Raises `ValueError` if there is no layer, or one is missing."""
    if not layers or sorted(layers) != list(range(len(layers))):
        raise ValueError(f"the layers with keys and values are {sorted(layers)}")
    return [layers[index] for index in range(len(layers))]


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a bool mask (True: may be attended to) to numbers that are added to the scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
