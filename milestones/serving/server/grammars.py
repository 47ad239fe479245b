"""Grammars of API calls: read from the body, and compiled before a request is queued.

A bad grammar is refused with status 400. Therefore a call waits for its grammar here, without the
engine's thread. When the engine gets the request, the grammar is compiled already.
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import LLMEngine, StructuredOutputsParams
from common.validation import shown

from .errors import ApiError

NAMES = ("response_format", "structured_outputs")  # the fields of a body: OpenAI's, and vLLM's
KINDS = {"json", "regex", "choice"}
ANY_OBJECT = StructuredOutputsParams(json={"type": "object"})


class Grammars:
    """Compiles the grammars of calls, if the served engine has grammars."""

    def __init__(self, engine: LLMEngine) -> None:
        self._refusal = engine.input_processor.no_structured_outputs
        self._manager = getattr(engine.core.scheduler, "grammars", None)

    async def check(self, structured: StructuredOutputsParams, given: dict[str, Any]) -> None:
        """Wait until a grammar is compiled. given: the body.

        Raises `ApiError` with the name of the field if the engine has no grammars, or if the
        grammar is bad or takes too long.
        """
        name = next((name for name in NAMES if given.get(name) is not None), NAMES[1])
        if self._refusal is not None or self._manager is None:
            raise ApiError(
                400, f"{name} is not supported by this server: {self._refusal}",
                param=name, code="unsupported_parameter",
            )  # fmt: skip
        compiler, seconds = self._manager.compiler, self._manager.timeout
        shared = compiler.submit(structured)
        try:
            # `wait` cancels nothing: other calls may wait for the same grammar.
            future = asyncio.wrap_future(shared)
            if not (await asyncio.wait([future], timeout=seconds))[0]:
                raise ApiError(400, f"{name} was not compiled within {seconds:g} s", param=name)
        finally:
            compiler.abandon(shared)  # also if the client has gone away
        if isinstance(error := future.exception(), ValueError):
            raise ApiError(400, f"{name}: {error}", param=name)
        future.result()


def read_grammar(given: dict[str, Any]) -> StructuredOutputsParams | None:
    """Return the grammar of a body. Raises `ApiError` or `ValueError` that names the field."""
    form, structured = (given.get(name) for name in NAMES)
    found = _of_format(form) if form is not None else None
    if structured is None:
        return found
    if found is not None:
        raise ApiError(
            400, "give either response_format or structured_outputs", param="structured_outputs"
        )
    if not isinstance(structured, dict) or structured.keys() - KINDS:
        raise ApiError(
            400, "structured_outputs must be an object with one of json, regex and choice, got "
            f"{shown(structured)}", param="structured_outputs",
        )  # fmt: skip
    return StructuredOutputsParams(**structured)


def _of_format(form: Any) -> StructuredOutputsParams | None:
    """Return the grammar of OpenAI's `response_format`; None for text."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text" and len(form) == 1:
        return None
    if kind == "json_object" and len(form) == 1:
        return ANY_OBJECT
    if kind == "json_schema" and isinstance(described := form.get("json_schema"), dict):
        schema = described.get("schema")
        if isinstance(schema, dict) and form.keys() <= {"type", "json_schema"}:
            try:
                return StructuredOutputsParams(json=schema)
            except ValueError as error:
                raise ApiError(400, f"response_format: {error}", param="response_format") from None
    raise ApiError(
        400, "response_format must have the type 'text', 'json_object', or 'json_schema' with a "
        f"schema in json_schema.schema, got {shown(form)}", param="response_format",
    )  # fmt: skip
