"""`OutputProcessor`: converts sampled tokens to text, stop decisions and `RequestOutput`s."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from ..outputs import FinishReason, RequestOutput
from ..parent_request import ParentRequest
from ..request import Request

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Holds every request that has not ended, and the outputs that have not been drained yet.

    I3: a request is removed from `requests` when it ends. Its final output waits in `outbox` for
    the next `drain`. Until then, its id stays in use.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.requests: dict[str, Request] = {}
        self.outbox: dict[str, RequestOutput] = {}
        self.parents: dict[str, ParentRequest] = {}  # of requests with n > 1, until they finish
        self.parent_of: dict[str, ParentRequest] = {}  # by the id of a child

    def add_request(self, request: Request) -> None:
        assert not self.is_in_use(request.request_id), "I4: this request id is in use"
        self.requests[request.request_id] = request

    def add_parent(self, parent: ParentRequest) -> None:
        """Merge the outputs of the children of `parent` from here on."""
        self.parents[parent.request_id] = parent
        self.parent_of.update(dict.fromkeys(parent.indices, parent))

    def is_in_use(self, request_id: str) -> bool:
        ids = (self.requests, self.outbox, self.parents)
        return any(request_id in known for known in ids)

    def find(self, request_id: str) -> Request | None:
        """Return the live request with this id; None for any other value, of any type."""
        return self.requests.get(request_id) if isinstance(request_id, str) else None

    def find_parent(self, request_id: str) -> ParentRequest | None:
        """Return the request with n > 1 that has this id and has not finished."""
        return self.parents.get(request_id) if isinstance(request_id, str) else None

    def live_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended, without those of children."""
        return [name for name in self.requests if name not in self.parent_of] + list(self.parents)

    def forget(self, request_id: str) -> None:
        """Drop a request and its outputs, whatever its state is."""
        if (parent := self.parents.get(request_id)) is not None:
            for child in parent.indices:
                self.requests.pop(child, None)
            self._remove_parent(parent)
        self.requests.pop(request_id, None)
        self.outbox.pop(request_id, None)

    def append_token(
        self, request: Request, token_id: int | None, logprobs: dict[int, float] | None = None
    ) -> bool:
        """Append the next token to a request; return True if the request ends with it.

        `token_id` is None if the logits were not a valid distribution. The request then ends with
        an error. An exception in the processing of its text also ends only this request: one
        request must not stop the others.
        """
        if token_id is None:
            self.fail(request, "the model's logits for the next token are not finite")
            return True
        request.token_ids.append(token_id)
        if request.logprobs is not None:
            assert logprobs is not None, (
                "a request that asks for logprobs must get them with each token"
            )
            request.logprobs.append(logprobs)
        if request.first_token_time is None:
            request.first_token_time = time.perf_counter()
        try:
            reason = self._finish_reason(request, token_id)
        except Exception as error:
            self.fail(request, "its text could not be processed", error)
            return True
        if reason is not None:
            self._finish(request, reason)
            return True
        self._put_output(request)
        return False

    def abort(self, request: Request) -> None:
        """End a request that was not finished, with finish reason `abort`."""
        try:
            request.text.finish()
        except Exception:
            logger.exception("%s was aborted; the end of its text is missing", request)
        self._finish(request, "abort")

    def fail(self, request: Request, reason: str, cause: BaseException | None = None) -> None:
        """End a request that cannot be computed. Keep its tokens and text so far."""
        request.error = reason if cause is None else f"{reason} ({type(cause).__name__}: {cause})"
        logger.error("%s ends: %s", request, request.error, exc_info=cause)
        self._finish(request, "error")

    def drain(self) -> list[RequestOutput]:
        """Remove and return the outputs: the newest one of each request, if there is a new one."""
        outputs = list(self.outbox.values())
        self.outbox.clear()
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Put back drained outputs that belong to other callers, unless there are newer ones."""
        for output in outputs:
            self.outbox.setdefault(output.request_id, output)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and put its one final output into the outbox."""
        assert not request.is_finished, f"I3: {request.request_id} must not end twice"
        request.finish_reason = reason
        request.finished_time = time.perf_counter()
        del self.requests[request.request_id]
        self._put_output(request)

    def _put_output(self, request: Request) -> None:
        """Put the output of a request, or of its parent, into the outbox."""
        output = request.output()
        if self.parent_of and (parent := self.parent_of.get(request.request_id)) is not None:
            output = parent.merge(output)
            if output.finished:
                self._remove_parent(parent)
        self.outbox[output.request_id] = output

    def _remove_parent(self, parent: ParentRequest) -> None:
        del self.parents[parent.request_id]
        for child in parent.indices:
            del self.parent_of[child]

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        if is_eos or (params.stop_token_ids and token_id in params.stop_token_ids):
            request.text.finish()  # the stop token itself is not part of the text
            return "stop"
        if request.text.append(token_id):
            return "stop"
        if len(request.token_ids) >= request.max_num_tokens:
            return "stop" if request.text.finish() else "length"
        return None
