"""`Admission`: a waiting request may join if others leave the step. Plain Python data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import Request

from .in_flight import continuing
from .m5_admission import Admission as M5Admission


class Admission(M5Admission):
    """Asks about the running requests, and also about only some of them."""

    def may_join(
        self,
        request: Request,
        running: list[Request],
        planned: Mapping[Request, int],
        without: Sequence[Request] = (),
    ) -> bool:
        """Return whether a request has a row, tokens and memory if others leave this step.

        planned: the tokens of each request in the step. without: the requests that leave.
        """
        staying = [other for other in running if other not in without]
        num_tokens = sum(n for other, n in planned.items() if other not in without)
        num_running = len(continuing(staying))
        if num_tokens >= self.max_num_batched_tokens or num_running >= self.max_num_running:
            return False
        with self.kv_cache.without(without):
            return self.fits(request, staying)
