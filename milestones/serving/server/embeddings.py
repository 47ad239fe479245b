"""`/v1/embeddings`: vectors of texts, in OpenAI's format."""

from __future__ import annotations

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

from common import LLMEngine, PoolingParams, PoolingRequestOutput, RequestOutput, TokensPrompt
from common.inputs import NO_POOLING

from .engine_thread import EngineRequest, EngineThread
from .errors import ApiError, Json
from .generation import CLIENT_GONE, now, unless_gone
from .limits import OpenRequests
from .output_box import OutputBox
from .prompts import PromptReader
from .protocol import prompts_of


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
                box = await self._open(prompts, params, arrival_time)
            except ValueError as error:  # the name of the field in this API
                raise ValueError(re.sub(r"^prompt\b", "input", str(error))) from error
            resources.callback(self._thread.close, box)
            finished = await unless_gone(request, lambda: _outputs(box))
            if finished is None:
                return Response(status_code=CLIENT_GONE)
            return Json(self._body([finished[i] for i in range(len(prompts))], call))

    async def _open(
        self, prompts: Sequence[TokensPrompt], params: PoolingParams, arrival_time: float
    ) -> OutputBox:
        name = f"embd-{uuid4().hex}"
        return await self._thread.open(
            [
                EngineRequest(f"{name}-{i}", prompt, params, arrival_time)
                for i, prompt in enumerate(prompts)
            ]
        )

    def _body(self, outputs: Sequence[PoolingRequestOutput], call: EmbeddingCall) -> dict[str, Any]:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [
            {"object": "embedding", "index": i, "embedding": encoded(o.outputs.data, call)}
            for i, o in enumerate(outputs)
        ]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}


async def _outputs(box: OutputBox) -> dict[int, PoolingRequestOutput]:
    """Return the output of each input, by its number. Raises `ApiError` if one has no vector."""
    found: dict[int, PoolingRequestOutput] = {}
    async for outputs in box.outputs():
        for output in outputs:
            found[int(output.request_id.rpartition("-")[2])] = _with_vector(output)
    return found


def _with_vector(output: RequestOutput) -> PoolingRequestOutput:
    assert isinstance(output, PoolingRequestOutput), "a pooling request has a vector"
    if output.outputs.data is None:
        reason = output.outputs.error or "the server aborted this request"
        raise ApiError(500, f"the request could not be computed: {reason}")
    return output


def encoded(data: torch.Tensor | None, call: EmbeddingCall) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of its float32 numbers, low byte first."""
    assert data is not None, "a finished request has a vector"
    if call.encoding_format == "float":
        return [float(value) for value in data]
    return base64.b64encode(data.numpy().astype("<f4").tobytes()).decode("ascii")
