"""`continuing`: a pooling request ends when its prompt has been computed."""

from __future__ import annotations

from collections.abc import Iterable

from common import Request

from .m5_in_flight import StepsInFlight, num_rows
from .pooling_request import PoolingRequest

__all__ = ["StepsInFlight", "continuing", "num_rows"]


def continuing(running: Iterable[Request]) -> list[Request]:
    """Return the requests that go on after the step in flight, as far as lengths can tell.

    A pooling request ends when its prompt has been computed: no token is appended to it.
    """
    return [
        request
        for request in running
        if (
            request.num_uncomputed_tokens > 0
            if isinstance(request, PoolingRequest)
            else len(request.token_ids) < request.max_num_tokens
        )
    ]
