"""`Admission`: pooling requests need memory for their prompts, and have no output."""

from __future__ import annotations

from common import Request

from .m5_admission import Admission as M5Admission
from .pooling_request import PoolingRequest


class Admission(M5Admission):
    """Compares the memory that requests are expected to need with the memory that is free."""

    def waits_for_prefix(self, request: Request, running: list[Request]) -> bool:
        if isinstance(request, PoolingRequest) and request.needs_all_tokens:
            return False  # it computes its whole prompt in any case
        return super().waits_for_prefix(request, running)

    def expect_more(self, running: list[Request]) -> None:
        # Pooling requests say nothing about the number of output tokens.
        generating = [r for r in running if not isinstance(r, PoolingRequest)]
        if generating:
            super().expect_more(generating)
