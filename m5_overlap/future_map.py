"""`FutureMap`: tokens that are not known yet, by name.

The scheduler plans step N+1 while step N computes the tokens that N+1 begins with. In their place
stands a placeholder, a negative number that says whose token is meant. It travels to the device
like a token id; there, step N has stored the token by then, since steps run in order.

    step N     ... -> sample -> store tokens at the rows of their requests
    step N+1   input_ids [ 17, -3, 254, -1 ]  -> resolve -> [ 17, map[3], 254, map[1] ] -> ...
"""

from __future__ import annotations

import torch

PADDING_INDEX = 0  # where rows of a batch that belong to no request store their token


def index_of(row: int | None) -> int:
    """A request's place in the map, for as long as it runs. Place 0 is for padding."""
    assert row is not None, "I3: only who runs has a place"
    return row + 1


def placeholder(row: int | None) -> int:
    """Stands for the token that the request in a row gets from the step before. Never 0: negative
    numbers are what tells placeholders from tokens."""
    return -index_of(row)


class FutureMap:
    """The newest token of each row, on the device. Read and written by forwards, in their order.

    Indexed by row, not by turns: what a request has stored stays until it stores again.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(index_of(num_rows), dtype=torch.int64, device=device)

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of any shape, placeholders replaced."""
        futures = self.token_ids[(-input_ids).clamp(min=0)]
        return torch.where(input_ids < 0, futures, input_ids)

    def store(self, indices: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Keep tokens [N] at indices [N]."""
        self.token_ids.index_copy_(0, indices, token_ids)
