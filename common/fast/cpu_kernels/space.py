"""Memory for the intermediate results of the kernels."""

from __future__ import annotations

import threading

import torch


class Space(threading.local):
    """Memory for intermediate results of the kernels, one for each thread.

    It is kept from call to call. The system provides new memory page by page, filled with zeros,
    which takes longer than using it.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.size, self.address = 0, 0

    def take(self, count: int) -> int:
        """Return the address of memory for `count` float32 numbers.

        It is valid until this thread calls `take` again.
        """
        if self.size < count:
            self.memory = torch.empty(count)
            self.size, self.address = count, self.memory.data_ptr()
        return self.address


SPACE = Space()
