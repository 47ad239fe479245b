"""`create_app`: the routes of the server, and what they share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from inspect import signature
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from common import LLMEngine, SamplingParams, TokensPrompt

from .access import middleware
from .chat_format import ChatFormat
from .completion_format import CompletionFormat, Echo, require_few
from .electives import Adapters, Grammars
from .embeddings import EmbeddingCall, Embeddings
from .engine_thread import EngineThread
from .errors import ApiError, Json, add_handlers
from .formats import Format
from .generation import CLIENT_GONE, Generation, now, unless_gone
from .limits import OpenRequests
from .live.engines import Engines
from .live.routes import Live, add_routes
from .metrics import Metrics
from .prompts import PromptReader
from .protocol import Call, ChatCall, CompletionCall, DetokenizeCall, TokenizeCall
from .settings import ServerSettings
from .token_bytes import TokenBytes
from .tools import read_template
from .turns import Turns

Prepared = tuple[Format, list[TokensPrompt]]


class Api:
    """The API calls on one engine."""

    def __init__(
        self, engine: LLMEngine, settings: ServerSettings, beside: LLMEngine | None = None
    ) -> None:
        """beside: an engine with the same model, which only the live page shows."""
        assert engine.config.max_model_len is not None
        self.model = settings.served_model_name or engine.loaded.name
        self.max_model_len = engine.config.max_model_len
        self.adapters = Adapters(engine, settings.lora_modules, self.model)
        self.metrics = Metrics(self.model, getattr(engine, "collectors", ()))
        turns = Turns()
        self.engine = EngineThread(engine, turns, self.metrics)
        template = read_template(engine, settings)
        self.has_tools = settings.tool_call_parser is not None
        self.prompts = PromptReader(engine.input_processor, settings, template)
        self.tokens = TokenBytes(engine.loaded.tokenizer)
        self.grammars = Grammars(engine)
        self.open = OpenRequests(settings.max_open_requests)
        self.embeddings = Embeddings(engine, self.engine, self.prompts, self.open, self.model)
        engines = Engines(engine, self.engine, turns, self.prompts, self.open, beside)
        self.live = Live(engines, self.prompts, self.open)
        self.created = int(time.time())
        self.arguments = signature(engine.add_request).parameters  # of its elective, too

    async def complete(self, call: CompletionCall, request: Request) -> Response:
        """Answer `/v1/completions`."""
        self.check(call.model)
        params, given = call.params(), call.prompts()

        async def prepare() -> Prepared:
            prompts = await self.prompts.read(given)
            echo = None
            if call.echo:
                texts = await self.prompts.with_text(prompts)
                each = [text for text in texts for _ in range(params.n)]
                echo = Echo(each, call.logprobs is not None, call.is_only_echo)
                require_few(prompts, params)
            name = call.model or self.model
            return CompletionFormat(name, self.tokens, params.logprobs or 0, echo), prompts

        return await self.answer(call, request, params, len(given), prepare)

    async def chat(self, call: ChatCall, request: Request) -> Response:
        """Answer `/v1/chat/completions`."""
        self.check(call.model)
        messages = self.messages_of(call)
        params, tools = call.params(self.max_model_len), call.read_tools()

        async def prepare() -> Prepared:
            given = None if tools is None else tools.given
            prompt = await self.prompts.read_chat(messages, call.chat_template_kwargs, given)
            name = call.model or self.model
            return ChatFormat(name, self.tokens, params.logprobs or 0, tools), [prompt]

        return await self.answer(call, request, params, 1, prepare)

    def messages_of(self, call: ChatCall) -> list[dict[str, Any]]:
        return call.conversation(has_tools=self.has_tools, has_images=self.prompts.has_images)

    async def embed(self, call: EmbeddingCall, request: Request) -> Response:
        """Answer `/v1/embeddings`."""
        self.check(call.model)
        return await self.embeddings.answer(call, request)

    async def answer(
        self,
        call: Call,
        request: Request,
        params: SamplingParams,
        num_prompts: int,
        prepare: Callable[[], Awaitable[Prepared]],
    ) -> Response:
        """Take places, prepare the prompts, queue them, and answer whole or as a stream.

        What fails before the first token has its own status, even if a stream was requested.
        """
        arrival_time = now()
        options = call.options(self.arguments) | self.adapters.options(call.model)

        async def prepared() -> Prepared:
            if params.structured_outputs is not None:
                await self.grammars.check(params.structured_outputs, call.model_extra or {})
            return await prepare()

        with ExitStack() as resources:
            places = resources.enter_context(ExitStack())
            places.enter_context(self.open.place_for(num_prompts * params.n))
            found = await unless_gone(request, prepared, self.engine.ended)
            if found is None:
                return Response(status_code=CLIENT_GONE)
            form, prompts = found
            generation = Generation(self.engine, form, params.n)
            await generation.admit(prompts, params, arrival_time, options)
            generation.box.on_finished = places.close  # a client may read slowly, or not at all
            resources.push(generation.resources)
            generation.resources = resources.pop_all()
        if call.stream:
            return generation.stream(call.with_usage, so_far=call.with_usage_so_far)
        return await generation.whole(request)

    async def tokenize(self, call: TokenizeCall) -> Response:
        """Answer `/tokenize`: the token ids of a prompt, or of a conversation."""
        self.check(call.model)
        with self.open.place_for(1):
            if call.prompt is not None and call.messages is None:
                (prompt,) = await self.prompts.read([call.prompt])
            elif call.messages is not None and call.prompt is None:
                messages = self.messages_of(ChatCall(messages=call.messages))
                prompt = await self.prompts.read_chat(messages)
            else:
                raise ApiError(400, "give either prompt or messages", param="prompt")
        ids = prompt.prompt_token_ids
        return Json({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def detokenize(self, call: DetokenizeCall) -> Response:
        """Answer `/detokenize`: the text of token ids."""
        self.check(call.model)
        with self.open.place_for(1):
            return Json({"prompt": await self.prompts.decode(call.tokens)})

    async def health(self) -> Response:
        """Answer `/health`: 200, or 503 if new requests are refused."""
        if self.open.is_draining:
            return Json({"status": "draining"}, 503)
        if not self.engine.is_alive:
            return Json({"status": "the engine failed"}, 503)
        return Json({"status": "ok"})

    async def respond(self) -> Response:
        """Answer `/v1/responses`, which this server does not have."""
        raise ApiError(404, "this server has no /v1/responses: use /v1/chat/completions")

    async def reset_prefix_cache(self) -> Response:
        """Answer `/reset_prefix_cache`: the number of pages that are free now."""
        pages = await self.engine.call(lambda engine: engine.reset_prefix_cache())
        return Json({"pages": pages})

    async def scrape(self) -> Response:
        """Answer `/metrics`."""
        alive = self.engine.is_alive
        stats = await self.engine.call(lambda engine: engine.stats()) if alive else None
        return Response(self.metrics.page(stats), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """Answer `/v1/models`."""
        self.check(None)
        cards = [self.card(name) for name in (self.model, *self.adapters.requests)]
        return Json({"object": "list", "data": cards})

    async def model_card(self, model: str) -> Response:
        """Answer `/v1/models/{model}`."""
        self.check(model)
        return Json(self.card(model))

    def card(self, model: str) -> dict[str, Any]:
        """Return the description of the model, or of an adapter, which has the model as parent."""
        parent = {} if model == self.model else {"parent": self.model}
        return {
            "id": model,
            "object": "model",
            "created": self.created,
            "owned_by": "llm-ladder",
            "max_model_len": self.max_model_len,
            **parent,
        }

    def check(self, model: str | None) -> None:
        """Raise an error if a call names another model, or if there is no engine."""
        if model not in (None, self.model, *self.adapters.requests):
            known = ", ".join(map(repr, (self.model, *self.adapters.requests)))
            raise ApiError(
                404, f"the model {model!r} does not exist; this server has {known}",
                param="model", code="model_not_found",
            )  # fmt: skip
        if not self.engine.is_alive:
            raise self.engine.dead()


def create_app(
    engine: LLMEngine, settings: ServerSettings, beside: LLMEngine | None = None
) -> FastAPI:
    """Return the server for an engine. From its start on, only its engine thread calls the engine.

    When the server stops, it closes the engines. `app.state.api` is the `Api`.
    """
    api = Api(engine, settings, beside)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        api.live.engines.start()
        yield
        await api.live.engines.stop()
        api.prompts.stop()

    app = FastAPI(
        title="LLM Ladder", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        middleware=middleware(settings),
    )  # fmt: skip
    app.state.api = api
    add_handlers(app)

    def get(path: str) -> Any:
        return app.api_route(path, methods=["GET", "HEAD"])

    app.post("/v1/completions")(api.complete)
    app.post("/v1/chat/completions")(api.chat)
    app.post("/v1/embeddings")(api.embed)
    app.post("/tokenize")(api.tokenize)
    app.post("/detokenize")(api.detokenize)
    app.post("/v1/responses")(api.respond)
    get("/v1/models")(api.models)
    get("/v1/models/{model:path}")(api.model_card)
    get("/health")(api.health)
    get("/metrics")(api.scrape)
    if settings.prefix_cache_route:
        app.post("/reset_prefix_cache")(api.reset_prefix_cache)
    if settings.live_page:
        add_routes(app, api.live)
    return app
