"""`FutureMap`: the newest token of each request, on the device, where the host does not know it.

The scheduler plans step N+1 while step N computes the tokens that N+1 begins with. A placeholder
stands for each of these tokens: a negative number that names the request's row. The placeholder
goes to the device like a token id. When step N+1 reads it there, step N has stored the token,
because steps run in order.

    step N     ... -> sample -> store tokens at the rows of their requests
    step N+1   input_ids [ 17, -3, 254, -1 ]  -> resolve -> [ 17, map[3], 254, map[1] ] -> ...
"""

from __future__ import annotations

import torch

from .placeholders import future_index


class FutureMap:
    """The newest token of each row, on the device. Forwards read and write it, in their order.

    A token stays in the map until its request stores the next one, even if the request takes no
    part in a step.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(future_index(num_rows), dtype=torch.int64, device=device)

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return token ids of any shape with their placeholders replaced by tokens."""
        futures = self.token_ids[(-input_ids).clamp(min=0)]
        return torch.where(input_ids < 0, futures, input_ids)

    def store(self, indices: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store tokens [N] at places [N] of the map."""
        self.token_ids.index_copy_(0, indices, token_ids)
