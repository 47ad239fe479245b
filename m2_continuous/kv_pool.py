"""`KVPool`: the memory of the KV cache. The Hugging Face model uses it as its `past_key_values`.

In each layer, the model calls `update` with the new keys and values, and attends to the result.
"""

from __future__ import annotations

from typing import Any

import torch

from common import EngineConfig
from common.hf.support import LayerKV

from .kv_cache import Move


class KVPool:
    """Two tensors per layer, [max_num_seqs, kv_heads, max_model_len, head_dim], allocated once."""

    def __init__(
        self, layers: list[LayerKV], config: EngineConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises `RuntimeError` that names the two limits if there is not enough memory."""
        rows, tokens = config.max_num_seqs, config.max_model_len
        assert tokens is not None

        def zeros(num_heads: int, head_dim: int) -> torch.Tensor:
            # Zeros, not uninitialized memory: a masked score has weight 0, and 0 times NaN is NaN.
            return torch.zeros(rows, num_heads, tokens, head_dim, dtype=dtype, device=device)

        try:
            self.keys = [zeros(layer.num_kv_heads, layer.key_dim) for layer in layers]
            self.values = [zeros(layer.num_kv_heads, layer.value_dim) for layer in layers]
        except RuntimeError as error:
            raise RuntimeError(
                f"no memory for a KV cache of max_num_seqs={rows} rows of max_model_len={tokens} "
                f"tokens: lower one of them ({error})"
            ) from error
        self.rows = torch.empty(0, dtype=torch.int64, device=device)  # [B] of the step's requests
        self.positions = torch.empty(0, 0, dtype=torch.int64, device=device)  # [B, T]
        self.longest_context = 0

    def begin_step(self, rows: torch.Tensor, positions: torch.Tensor, longest_context: int) -> None:
        """Set where the next forward stores its tokens: at `positions` [B, T] of `rows` [B]."""
        self.rows, self.positions, self.longest_context = rows, positions, longest_context

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, [B, kv_heads, T, head_dim]. Return those to attend to.

        A prefill attends to itself: the cache holds nothing of its requests yet. Its padding is
        stored too, after the prompt, where decode overwrites it before a query can see it.
        A decode attends to the first B rows up to the longest context: a view, not a copy.
        """
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        batch, _heads, num_tokens, _dim = key.shape
        if num_tokens == self.longest_context:
            keys[self.rows, :, :num_tokens] = key
            values[self.rows, :, :num_tokens] = value
            return key, value
        keys[self.rows, :, self.positions[:, 0]] = key[:, :, 0]
        values[self.rows, :, self.positions[:, 0]] = value[:, :, 0]
        return keys[:batch, :, : self.longest_context], values[:batch, :, : self.longest_context]

    def release(self) -> None:
        """Free the memory. No forward may follow."""
        self.keys, self.values = [], []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens. No model uses it if `position_ids` are given."""
        return self.longest_context - self.positions.shape[-1]

    def move(self, move: Move) -> None:
        """Copy the tokens of a row into the row that became free, in every layer."""
        source, target, n = move
        for memory in (*self.keys, *self.values):
            memory[target, :, :n] = memory[source, :, :n]
