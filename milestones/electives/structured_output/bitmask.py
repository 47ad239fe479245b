"""`TokenMask`: the tokens that grammars allow in a step, one bit for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

WORD = 32  # bits


def num_words(vocab_size: int) -> int:
    """Return the number of words that hold a bit for each token."""
    return -(-vocab_size // WORD)


@dataclass
class TokenMask:
    """The masks of the n rows that have a grammar. The other rows of the batch stay as they are."""

    rows: torch.Tensor  # [n] int64: indices in the batch
    bits: torch.Tensor  # [n, W] int32: bit i of word w stands for token 32 * w + i

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] in float32, with -inf for the tokens that are not allowed.

        Columns after the last word belong to no token, and are not allowed either.
        """
        logits = logits.float()
        places = torch.arange(WORD, dtype=torch.int32, device=self.bits.device)
        allowed = (self.bits[:, :, None] >> places & 1).flatten(1).bool()  # [n, 32 * W]
        missing = max(0, logits.shape[-1] - allowed.shape[-1])
        allowed = pad(allowed, (0, missing))[:, : logits.shape[-1]]
        masked = logits[self.rows].masked_fill(~allowed, -torch.inf)
        return logits.index_copy(0, self.rows, masked)
