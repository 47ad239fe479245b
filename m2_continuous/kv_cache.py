"""`KVCacheManager`: which row of the KV cache belongs to whom. Plain Python data, no tensors.

Every running request owns one row, long enough for the longest request there may be. Rows in use
are always the first ones, so a decode step reads the cache through a view, without a copy:

    row   0  1  2  3  4  5          B ends: the last row moves into the hole
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
    """I3: row i is owned by `rows[i]`, whose `row` is i; there are no other owners and no holes."""

    def __init__(self, num_rows: int, row_tokens: int) -> None:
        self.num_rows = num_rows
        self.row_tokens = row_tokens
        self.rows: list[Request] = []

    @property
    def has_free_row(self) -> bool:
        return len(self.rows) < self.num_rows

    @property
    def num_reserved_tokens(self) -> int:
        """What the owners' rows could hold, used or not: a row is reserved whole."""
        return len(self.rows) * self.row_tokens

    @property
    def num_used_tokens(self) -> int:
        return sum(request.num_computed_tokens for request in self.rows)

    def allocate(self, request: Request) -> None:
        """Give a request the first free row."""
        assert self.has_free_row and request.row is None, f"I3: no row for {request}"
        request.row = len(self.rows)
        self.rows.append(request)

    def free(self, request: Request) -> Move | None:
        """Take a request's row; return the move that closes the hole, if there is one."""
        hole, last = request.row, self.rows.pop()
        assert hole is not None, f"I3: {request} has no row to free"
        request.row = None
        if last is request:
            return None
        self.rows[hole] = last
        assert last.row is not None, f"I3: {last} owns a row"
        move = Move(source=last.row, target=hole, num_tokens=last.num_computed_tokens)
        last.row = hole
        return move

    def check_invariants(self, running: list[Request]) -> None:
        assert len(self.rows) == len(running) and set(self.rows) == set(running), (
            f"I3: rows are owned by {self.rows}, running are {running}"
        )
        for row, request in enumerate(self.rows):
            assert request.row == row, f"I3: {request} is in row {row} and believes {request.row}"
            assert request.num_computed_tokens <= self.row_tokens, f"I3: {request} outgrew its row"
