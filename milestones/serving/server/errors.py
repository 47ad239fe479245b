"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common import EngineDeadError
from common.validation import shown

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
FIELD = re.compile(r"(\w+)(?: |:)")  # a message of the engine begins with the name of the field
LONGEST_SHOWN = 1000  # characters of a message


class ApiError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST_SHOWN else message[:LONGEST_SHOWN] + "..."
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Return the body of the answer, which is also the last event of a failed stream."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, usual)
        detail = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": detail}


class Json(Response):
    """A JSON response in ASCII: half of a surrogate pair in an input can be quoted too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def refused(name: str, value: Any, *, has_other_values: bool = False) -> ApiError:
    """Return the error for a parameter that the server does not have.

    has_other_values: the server has it, and refuses only this value.
    """
    with_value = f" with the value {shown(value)}" if has_other_values else ""
    return ApiError(
        400, f"{shown(name)} is not supported by this server{with_value}",
        param=name[:80], code="unsupported_parameter",
    )  # fmt: skip


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told about an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValueError):
        found = FIELD.match(str(error))
        return ApiError(400, str(error), param=found[1] if found else None)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    return ApiError(500, f"the server failed: {type(error).__name__}")


def not_computed(reason: str | None) -> ApiError:
    """Return the error for a request that the engine ended without an answer."""
    reason = reason or "the server aborted this request"
    return ApiError(500, f"the request could not be computed: {reason}")


def respond(error: BaseException) -> Json:
    """Return the response for an exception."""
    found = api_error(error)
    return Json(found.body(), found.status, found.headers)


def add_handlers(app: FastAPI) -> None:
    """Let an app answer every exception in this format."""

    async def failed(request: Request, error: Exception) -> Response:
        return respond(error)

    async def not_routed(request: Request, error: Any) -> Response:
        return respond(ApiError(error.status_code, str(error.detail), headers=error.headers))

    async def invalid(request: Request, error: Any) -> Response:
        return respond(_invalid(error.errors()[0]))

    for kind in (ApiError, EngineDeadError, ValueError, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(RequestValidationError, invalid)


def _invalid(problem: dict[str, Any]) -> ApiError:
    """Return an error for the first problem that pydantic found in a body."""
    if problem["type"] == "json_invalid":
        place, reason = problem["loc"][-1], problem.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason} at character {place}")
    names = [str(part) for part in problem["loc"][1:]]
    if not names:
        return ApiError(
            400, "the body must be a JSON object, and the header Content-Type: application/json"
        )
    name = ".".join(names)
    value = "" if problem["type"] == "missing" else f", got {shown(problem['input'])}"
    return ApiError(400, f"{name}: {problem['msg']}{value}", param=names[0])
