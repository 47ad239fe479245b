"""What only some electives have: adapters (lora), grammars (structured_output), embeddings.

Each part refuses a call by the name of its field if the served engine cannot do it.

A bad grammar is refused with status 400. Therefore a call waits for its grammar here, without the
engine's thread. When the engine gets the request, the grammar is compiled already.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal
from uuid import uuid4

import torch
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from common import (
    LLMEngine,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    StructuredOutputsParams,
)
from common.inputs import NO_POOLING
from common.validation import shown

from .engine_thread import EngineRequest, EngineThread, OutputBox
from .errors import ApiError, Json, not_computed
from .generation import CLIENT_GONE, now, unless_gone
from .limits import OpenRequests
from .prompts import PromptReader, prompts_of

NO_ADAPTERS = "lora_modules: this engine has no adapters; the elective lora has them"
GRAMMAR_FIELDS = ("response_format", "structured_outputs")  # of a body: OpenAI's, and vLLM's
KINDS = {"json", "regex", "choice"}
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
        name = next(name for name in GRAMMAR_FIELDS if given.get(name) is not None)
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
            compiler.abandon(shared)  # even if the client has gone away
        if isinstance(error := future.exception(), ValueError):
            raise ApiError(400, f"{name}: {error}", param=name)
        future.result()


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


class EmbeddingCall(BaseModel):
    """The body of `/v1/embeddings`. `input`: text, token ids, or a list of them.

    `pooling_type` and `normalize` are those of `PoolingParams`. OpenAI's API does not have them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    pooling_type: Any = "LAST"
    normalize: Any = True

    def params(self) -> PoolingParams:
        """Return the pooling parameters. Raises `ValueError` for a wrong one."""
        return PoolingParams(self.pooling_type, self.normalize, self.dimensions)


class Embeddings:
    """Answers the calls for embeddings, if the served engine makes any."""

    def __init__(
        self,
        engine: LLMEngine,
        thread: EngineThread,
        prompts: PromptReader,
        places: OpenRequests,
        model: str,
    ) -> None:
        self._can = getattr(engine.input_processor, "hidden_size", None) is not None
        self._thread = thread
        self._prompts = prompts
        self._places = places
        self._model = model

    async def answer(self, call: EmbeddingCall, request: Request) -> Response:
        """Return the vectors of a call when all of them are there. If the client leaves, abort."""
        if not self._can:
            raise ApiError(400, f"embeddings: {NO_POOLING}", code="unsupported_endpoint")
        arrival_time, params = now(), call.params()
        given = prompts_of("input", call.input)
        with ExitStack() as resources:
            resources.enter_context(self._places.place_for(len(given)))
            try:
                prompts = await self._prompts.read(given, num_outputs=0)
                ids = [f"embd-{uuid4().hex}" for _ in prompts]
                box = await self._thread.open(
                    [EngineRequest(i, p, params, arrival_time) for i, p in zip(ids, prompts)]
                )
            except ValueError as error:  # the name of the field in this API
                raise ValueError(re.sub(r"^prompt\b", "input", str(error))) from error
            resources.callback(self._thread.close, box)
            finished = await unless_gone(request, lambda: _outputs(box))
            if finished is None:
                return Response(status_code=CLIENT_GONE)
            return Json(self._body([finished[i] for i in ids], call))

    def _body(self, outputs: Sequence[PoolingRequestOutput], call: EmbeddingCall) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": i, "embedding": encoded(o.outputs.data, call)}
            for i, o in enumerate(outputs)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}


async def _outputs(box: OutputBox) -> dict[str, PoolingRequestOutput]:
    """Return the output of each request, by its id. Raises `ApiError` if one has no vector."""
    found: dict[str, PoolingRequestOutput] = {}
    async for outputs in box.outputs():
        for output in outputs:
            assert isinstance(output, PoolingRequestOutput), "a pooling request has a vector"
            if output.outputs.data is None:
                raise not_computed(output.outputs.error)
            found[output.request_id] = output
    return found


def encoded(data: torch.Tensor | None, call: EmbeddingCall) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of its float32 numbers, low byte first."""
    assert data is not None, "a finished request has a vector"
    if call.encoding_format == "float":
        return [float(value) for value in data]
    return base64.b64encode(data.numpy().astype("<f4").tobytes()).decode("ascii")
