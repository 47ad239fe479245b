"""`OutputProcessor`: converts what a core returns to text, stop strings and `RequestOutput`s."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ..engine_core import EngineCoreOutput
from ..outputs import FinishReason, RequestOutput
from ..request import ParentRequest, Request

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Holds each request until its final output is drained, and outputs that were put back.

    I3: the id of a request is in use until its final output has been drained.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """now: the clock of the engine."""
        self.now = now
        self.requests: dict[str, Request] = {}
        self.changed: dict[Request, None] = {}  # a set in order: they have a new output
        self.outbox: dict[str, RequestOutput] = {}  # drained before, and not delivered
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
        # No generator, because Python drops an interrupt that arrives while it closes one.
        in_engine = request_id in self.requests or request_id in self.parents
        return in_engine or request_id in self.outbox

    def find(self, request_id: str) -> list[Request]:
        """Return the live requests with this id: several if n > 1, none for any other value."""
        if not isinstance(request_id, str):
            return []
        parent = self.parents.get(request_id)
        ids = [request_id] if parent is None else sorted(parent.unfinished)
        return [r for name in ids if (r := self.requests.get(name)) and not r.is_finished]

    def live_requests(self) -> list[Request]:
        """Return the requests that have not ended."""
        return [request for request in self.requests.values() if not request.is_finished]

    def live_ids(self) -> list[str]:
        """Return the ids of all requests without a final output, without those of children."""
        has_ended = {request for request in self.changed if request.is_finished}
        ids = [name for name, request in self.requests.items() if request not in has_ended]
        return [name for name in ids if name not in self.parent_of] + list(self.parents)

    def forget(self, request_id: str) -> None:
        """Drop a request and its outputs, whatever its state is."""
        parent = self.parents.get(request_id)
        for name in (request_id, *(parent.indices if parent else ())):
            if (request := self.requests.pop(name, None)) is not None:
                self.changed.pop(request, None)
        if parent is not None:
            self._remove_parent(parent)
        self.outbox.pop(request_id, None)

    def process(self, result: EngineCoreOutput) -> FinishReason | None:
        """Add new tokens to the text of their request.

        Return why the request must end although the core goes on with it: a stop string is
        complete, or an exception came up in the processing of its text. One request must not stop
        the others.
        """
        request = result.request
        reason: FinishReason | None = None
        if result.error is not None:
            self.fail(request, result.error)
        if request.first_token_time is None and result.new_tokens:
            request.first_token_time = self.now()
        try:
            if self._completes_a_stop_string(request, result):
                reason = "stop"
        except Exception as error:
            self.fail(request, "its text could not be processed", error)
            reason = "error"
        self.changed[request] = None
        if reason is not None and result.finish_reason is not None:
            request.finish_reason = reason  # instead of the reason of the core
            return None
        return reason

    def fail(self, request: Request, reason: str, cause: BaseException | None = None) -> None:
        """Note why a request ends with an error. It keeps its tokens and its text so far."""
        request.error = reason if cause is None else f"{reason} ({type(cause).__name__}: {cause})"
        logger.error("%s ends: %s", request, request.error, exc_info=cause)
        self.changed[request] = None

    def abort(self, request: Request) -> None:
        """Add the end of the text of a request that was aborted."""
        try:
            request.text.finish()
        except Exception:
            logger.exception("%s was aborted; the end of its text is missing", request)
        self.changed[request] = None

    def drain(self) -> list[RequestOutput]:
        """Remove and return the outputs: the newest one of each request, if there is a new one."""
        for request in self.changed:
            if request.finish_reason is not None:
                request.finished_time = self.now()
                del self.requests[request.request_id]
            self._put_output(request)
        self.changed.clear()
        outputs = list(self.outbox.values())
        self.outbox.clear()
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Put back drained outputs that belong to other callers, unless there are newer ones."""
        for output in outputs:
            self.outbox.setdefault(output.request_id, output)

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

    def _completes_a_stop_string(self, request: Request, result: EngineCoreOutput) -> bool:
        """Add new tokens to the text, up to the one that completes a stop string."""
        finish_reason, left = result.finish_reason, len(result.new_tokens)
        for token_id, _logprobs in result.new_tokens:
            assert token_id is not None
            left -= 1
            if left == 0 and finish_reason == "stop":
                request.text.finish()  # the stop token itself is not part of the text
            elif request.text.append(token_id):
                if left > 0:  # the tokens after it are not part of the output
                    request.output_end = request.num_tokens - left
                return True
        return finish_reason == "length" and request.text.finish()
