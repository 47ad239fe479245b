"""`KVCacheManager`: which row of the KV cache each request owns. Plain Python data, no tensors.

Every running request owns one row, long enough for the longest request. The rows in use are always
the first ones, so a decode step reads the cache through a view, without a copy:

    row   0  1  2  3  4  5          B finishes: the last row moves into the hole
          A  B  C  D  .  .    -->   A  D  C  .  .  .
"""

from __future__ import annotations

from typing import NamedTuple

from common import Request


class Move(NamedTuple):
    """Copy the first `num_tokens` tokens of row `source` into row `target`."""

    source: int
    target: int
    num_tokens: int


class KVCacheManager:
    """I3: row i is owned by `rows[i]`, and the `row` of that request is i. There are no holes."""

    def __init__(self, num_rows: int, row_tokens: int) -> None:
        self.num_rows = num_rows
        self.row_tokens = row_tokens
        self.rows: list[Request] = []
        self.moves: list[Move] = []  # for the runner to do before the next forward, oldest first

    @property
    def has_free_row(self) -> bool:
        return len(self.rows) < self.num_rows

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that the rows in use can hold. A row is reserved as a whole."""
        return len(self.rows) * self.row_tokens

    @property
    def num_used_tokens(self) -> int:
        """Tokens that are written in the rows in use."""
        return sum(request.num_computed_tokens for request in self.rows)

    def allocate(self, request: Request) -> None:
        """Give the first free row to a request."""
        assert self.has_free_row and request.row is None, f"I3: no row for {request}"
        request.row = len(self.rows)
        self.rows.append(request)

    def free(self, request: Request) -> None:
        """Take back the row of a request. The last row moves into the hole, if there is one."""
        hole, last = request.row, self.rows.pop()
        assert hole is not None, f"I3: {request} has no row to free"
        request.row = None
        if last is request:
            return
        self.rows[hole] = last
        assert last.row is not None, f"I3: {last} owns no row"
        self.moves.append(Move(last.row, hole, last.num_computed_tokens))
        last.row = hole

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if the rows are not owned by exactly the running requests."""
        assert len(self.rows) == len(running) and set(self.rows) == set(running), (
            f"I3: {self.rows} own rows, but {running} run"
        )
        for row, request in enumerate(self.rows):
            assert request.row == row, (
                f"I3: {request} is in row {row}, but its row is {request.row}"
            )
            assert request.num_computed_tokens <= self.row_tokens, f"I3: {request} outgrew its row"
