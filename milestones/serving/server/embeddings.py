"""The calls for embeddings, of the elective `embedding`. Other engines refuse them."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from common import LLMEngine, PoolingParams, PoolingRequestOutput, TokensPrompt
from common.inputs import NO_POOLING
from common.validation import require_list

from .engine_thread import EngineRequest, EngineThread
from .errors import ApiError, Json, not_computed
from .generation import CLIENT_GONE, now, unless_gone
from .limits import OpenRequests
from .prompts import PromptReader, prompts_of

MOST_INPUTS = 2048  # of a call, as in OpenAI's API
SHARE = 4  # a call takes at most one place of four, and computes its inputs in groups

T = TypeVar("T")


class EmbeddingCall(BaseModel):
    """The body of `/v1/embeddings`. `input`: text, token ids, or a list of them.

    `pooling_type` and `normalize` are those of `PoolingParams`. OpenAI's API does not have them.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling_type: Any = None
    normalize: Any = None

    def params(self) -> PoolingParams:
        """Return the pooling parameters. Raises `ValueError` for a wrong one."""
        pooling_type: Any = "LAST" if self.pooling_type is None else self.pooling_type
        normalize = True if self.normalize is None else self.normalize
        return PoolingParams(pooling_type, normalize, self.dimensions)


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
        require_list("input", given, "inputs", most=MOST_INPUTS)
        size = min(len(given), max(1, self._places.most // SHARE))
        with self._places.place_for(size):

            async def compute() -> list[PoolingRequestOutput]:
                prompts = await self._read(given)
                found: list[PoolingRequestOutput] = []
                for group in groups(prompts, size):
                    found += await self._compute(group, params, arrival_time)
                return found

            outputs = await unless_gone(request, compute, self._thread.ended)
        if outputs is None:
            return Response(status_code=CLIENT_GONE)
        return await asyncio.to_thread(lambda: Json(self._body(outputs, call)))

    async def _read(self, given: Sequence[Any]) -> list[TokensPrompt]:
        with naming_input():
            return await self._prompts.read(given, num_outputs=0)

    async def _compute(
        self, prompts: Sequence[TokensPrompt], params: PoolingParams, arrival_time: float
    ) -> list[PoolingRequestOutput]:
        """Return the outputs of prompts in their order. Raises `ApiError` if one has no vector."""
        ids = [f"embd-{uuid4().hex}" for _ in prompts]
        requests = [EngineRequest(i, p, params, arrival_time) for i, p in zip(ids, prompts)]
        with naming_input():
            box = await self._thread.open(requests)
        found: dict[str, PoolingRequestOutput] = {}
        try:
            async for outputs in box.outputs():
                for output in outputs:
                    assert isinstance(output, PoolingRequestOutput), (
                        "a pooling request has a vector"
                    )
                    if output.outputs.data is None:
                        raise not_computed(output.outputs.error)
                    found[output.request_id] = output
        finally:
            self._thread.close(box)
        return [found[i] for i in ids]

    def _body(self, outputs: Sequence[PoolingRequestOutput], call: EmbeddingCall) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": i, "embedding": encoded(o.outputs.data, call)}
            for i, o in enumerate(outputs)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}


@contextmanager
def naming_input() -> Iterator[None]:
    """Return a context in which errors of a prompt have the name that it has in this API."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"^prompt\b", "input", str(error))) from error


def groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in groups of that size; the last one may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def encoded(data: torch.Tensor | None, call: EmbeddingCall) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of its float32 numbers, low byte first."""
    assert data is not None, "a finished request has a vector"
    if call.encoding_format == "base64":
        return base64.b64encode(data.numpy().astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = data.tolist()
    return numbers
