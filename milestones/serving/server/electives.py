"""What only some electives have: adapters (lora), grammars (structured_output), hints (agents).

Each part refuses a call by the name of its field if the served engine cannot do it.

A bad grammar is refused with status 400. Therefore a call waits for its grammar here, without the
engine's thread. When the engine gets the request, the grammar is compiled already.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

from common import AgentHint, LLMEngine, LoRARequest, StructuredOutputsParams
from common.validation import shown

from .errors import ApiError
from .limits import RETRY_AFTER

NO_ADAPTERS = "lora_modules: this engine has no adapters; the elective lora has them"
GRAMMAR_FIELDS = ("response_format", "structured_outputs")  # of a body: OpenAI's, and vLLM's
KINDS = {field.name for field in fields(StructuredOutputsParams)}
HINT_FIELDS = {"session_id", "expected_pause", "cache_control", "context_management"}
DEFAULT_TTL = 300.0  # seconds, as in the RFC
EVICT = {"type": "evict"}
ANY_OBJECT = StructuredOutputsParams(json={"type": "object"})


class Adapters:
    """Loads adapters, and returns the arguments that a request with one of them needs."""

    def __init__(self, engine: LLMEngine, lora_modules: str | None, model: str) -> None:
        """Load `name=folder` pairs, separated by commas. model: the served name of the model.

        Raises `ValueError`, which names the setting, if one cannot be loaded.
        """
        self.requests = read_modules(lora_modules)
        add_lora: Any = getattr(engine, "add_lora", None)
        if self.requests and add_lora is None:
            raise ValueError(NO_ADAPTERS)
        if model in self.requests:
            raise ValueError(f"lora_modules: {model!r} is the name of the model itself")
        for name, request in self.requests.items():
            try:
                add_lora(request)
            except ValueError as error:
                raise ValueError(f"lora_modules: {name}: {error}") from error

    def options(self, model: str | None) -> dict[str, Any]:
        """Return more arguments of `add_request` for a call that names this model."""
        request = None if model is None else self.requests.get(model)
        return {} if request is None else {"lora_request": request}


def read_modules(text: str | None) -> dict[str, LoRARequest]:
    """Return adapters by name. Raises `ValueError` for text that is not a list of `name=folder`."""
    found: dict[str, LoRARequest] = {}
    for part in text.split(",") if text else []:
        name, _, folder = (piece.strip() for piece in part.partition("="))
        if not name or not folder or name in found:
            raise ValueError(
                f"lora_modules must be name=folder, separated by commas, each name once: {part!r}"
            )
        found[name] = LoRARequest(name, folder)
    return found


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
        name = next((name for name in GRAMMAR_FIELDS if given.get(name) is not None), "tools")
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
                raise ApiError(
                    503, f"{name} was not compiled within {seconds:g} s: the compilers are busy",
                    param=name, code="compilers_busy", headers=RETRY_AFTER,
                )  # fmt: skip
        finally:
            compiler.abandon(shared)  # even if the client has gone away
        if isinstance(error := future.exception(), ValueError):
            raise ApiError(400, f"{name}: {error}", param=name)
        future.result()


def read_hint(given: dict[str, Any]) -> AgentHint:
    """Return the hint of a body. Raises `ApiError` or `ValueError` that names the field.

    The fields are those of vLLM's RFC 52113. An edit of type `evict` releases the conversation.
    `expected_pause` is not in the RFC: without it, the engine estimates.
    """
    control, management = given.get("cache_control"), given.get("context_management")
    edits = management.get("edits") if isinstance(management, dict) else None
    if (
        given.keys() - HINT_FIELDS
        or not (control is None or _is_lifetime(control))
        or not (management is None or (edits == [EVICT] and len(management) == 1))
    ):
        raise ApiError(
            400, "agent_hint must be an object with session_id, and perhaps expected_pause, "
            'cache_control of {"type": "ephemeral", "ttl": seconds}, and context_management of '
            f'{{"edits": [{{"type": "evict"}}]}}, got {shown(given)}', param="agent_hint",
        )  # fmt: skip
    return AgentHint(
        given.get("session_id", ""),
        given.get("expected_pause"),
        None if control is None else control.get("ttl", DEFAULT_TTL),
        release=management is not None,
    )


def _is_lifetime(control: Any) -> bool:
    """Return whether this is vLLM's `cache_control`."""
    return (
        isinstance(control, dict)
        and control.keys() <= {"type", "ttl"}
        and control.get("type", "ephemeral") == "ephemeral"
    )


def read_grammar(given: dict[str, Any]) -> StructuredOutputsParams | None:
    """Return the grammar of a body. Raises `ApiError` or `ValueError` that names the field."""
    form, structured = (given.get(name) for name in GRAMMAR_FIELDS)
    found = _of_format(form) if form is not None else None
    if structured is None:
        return found
    if found is not None:
        raise ApiError(
            400, "give either response_format or structured_outputs", param="structured_outputs"
        )
    if not isinstance(structured, dict) or structured.keys() - KINDS:
        raise ApiError(
            400, "structured_outputs must be an object with one of "
            f"{', '.join(sorted(KINDS))}, got "
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
