"""What the front and a replica send to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .prefix_index import CacheReport, PageKey

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class ForwardedCall:
    """An HTTP call with its whole body.

    number: no other call of this front has it. keys: of the pages of the prompt; empty if the call
    has none. seen: the newest report that the router has of each replica.
    """

    number: int
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    keys: tuple[PageKey, ...] = ()
    seen: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Head:
    """The first item of an answer."""

    replica: str
    status: int
    headers: Headers


@dataclass(frozen=True)
class Tail:
    """The last item of an answer. Without it, the answer is not complete.

    report: the changes of the replica's cache; None if it has no prefix cache.
    """

    replica: str
    report: CacheReport | None


Item = Head | bytes | Tail


@dataclass(frozen=True)
class Description:
    """What a front must know about a replica.

    page_size: None if the engine has no prefix cache. num_pages: of its pool. tokenizer: pickled.
    """

    replica: str
    pid: int
    model: str
    max_model_len: int
    page_size: int | None
    num_pages: int
    tokenizer: bytes


class ReplicaDiedError(Exception):
    """A replica died while it answered, or before."""

    def __init__(self, replica: str | None) -> None:
        super().__init__(f"replica {replica} died")
        self.replica = replica
