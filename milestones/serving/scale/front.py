"""`Front`: the server that clients see. It forwards each call to a replica, and the answer back.

`PromptKeys` has the keys of the prompt of a call, in a thread of its own. `merged_pages` makes one
page for Prometheus of those of all replicas.

    client ──> Guard ──> Front.forward ──> PromptKeys ──> Replicas.answer ──> a replica
                              ^                                  |
                              +── head, pieces of the body, tail +

A call is sent again if its replica dies before anything of the answer has reached the client. After
that, a stream ends with an error event. So each call has one answer, and each answer has an end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..server.access import middleware
from ..server.errors import ApiError, Json
from ..server.limits import OpenRequests
from ..server.prompts import set_here
from ..server.protocol import ChatCall, CompletionCall
from ..server.settings import ServerSettings
from .answer import Answer, Calls, Replicas
from .prefix_index import PageKey, page_keys
from .wire import Description, ForwardedCall

CHARACTERS_PER_TOKEN = 16  # a longer prompt than this times max_model_len is cut before tokenizing
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$")
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class PromptKeys:
    """Tokenizes prompts as a replica does, to look them up in the index.

    A call that cannot be read has no keys. The replica says what is wrong with it.
    """

    def __init__(self, replica: Description) -> None:
        self._page_size = replica.page_size
        self._max_model_len = replica.max_model_len
        self._tokenizer: Any = pickle.loads(replica.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-keys")

    async def of(self, path: str, body: bytes) -> tuple[PageKey, ...]:
        """Return the keys of the first prompt of a call; nothing if it has none."""
        if self._page_size is None or path not in READERS:
            return ()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._keys, path, body)

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _keys(self, path: str, body: bytes) -> tuple[PageKey, ...]:
        assert self._page_size is not None
        try:
            token_ids = READERS[path](self, json.loads(body))
            return tuple(page_keys(token_ids[: self._max_model_len], self._page_size))
        except Exception:  # any input: the replica has the right error for it
            return ()

    def _completion(self, values: Any) -> list[int]:
        prompt = CompletionCall(**values).prompts()[0]
        return prompt if isinstance(prompt, list) else self._encode(prompt, True)

    def _chat(self, values: Any) -> list[int]:
        call = ChatCall(**values)
        variables = call.chat_template_kwargs or {}
        if set_here(self._tokenizer).intersection(variables):
            return []  # the replica refuses it: a client's template must not run here either
        messages, tools = call.conversation(has_tools=True), call.read_tools()
        text = self._tokenizer.apply_chat_template(
            messages, tools=None if tools is None else list(tools.given), tokenize=False,
            add_generation_prompt=True, **variables,
        )  # fmt: skip
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        most = CHARACTERS_PER_TOKEN * self._max_model_len
        return list(self._tokenizer.encode(text[:most], add_special_tokens=add_special_tokens))


READERS = {
    "/v1/completions": PromptKeys._completion,
    "/v1/chat/completions": PromptKeys._chat,
}


class Front:
    """Forwards calls. `is_draining` of `open` refuses new ones, as in the server of one engine."""

    def __init__(self, replicas: Replicas, settings: ServerSettings, keys: PromptKeys) -> None:
        self.replicas = replicas
        self.open = OpenRequests(settings.max_open_requests)
        self.calls = Calls(replicas, self.open)
        self._settings = settings
        self._keys = keys
        self._numbers = itertools.count(1)

    async def forward(self, request: Request) -> Response:
        """Return the answer to a call, which will be read from a replica."""
        num_replicas = max(1, len(self.replicas.balancer.names))
        self.open.most = self._settings.max_open_requests * num_replicas
        path, body = request.url.path, await request.body()
        call = ForwardedCall(
            next(self._numbers),
            request.method,
            path,
            request.scope["query_string"],
            tuple(request.headers.raw),
            body,
            await self._keys.of(path, body),
        )
        return Answer(self.calls, call)

    async def health(self, request: Request) -> Response:
        """Answer `/health`: 200 if at least one replica is there."""
        if self.open.is_draining:
            return Json({"status": "draining"}, 503)
        names = self.replicas.balancer.names
        return Json({"status": "ok" if names else "no replica runs"}, 200 if names else 503)

    async def state(self, request: Request) -> Response:
        """Answer `/replicas`: what the router knows about each replica."""
        balancer = self.replicas.balancer
        loads, sent = balancer.loads, balancer.sent
        found = await self.replicas.descriptions()
        rows = [
            {
                "name": one.replica, "pid": one.pid, "num_pages": one.num_pages,
                "load": loads.get(one.replica, 0), "sent": sent.get(one.replica, 0),
            }
            for one in found
        ]  # fmt: skip
        return Json({"replicas": rows, "retried": self.calls.retried})

    async def metrics(self, request: Request) -> Response:
        """Answer `/metrics`: the pages of all replicas, with a label for the replica."""
        page = merged_pages(await self.replicas.metrics(), self.replicas.balancer.loads)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def end_all(self, error: ApiError) -> None:
        """End all answers with an error."""
        for answer in [*self.calls.answers]:
            answer.fail(error)

    def app(self) -> Starlette:
        """Return the application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            self._keys.stop()

        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/replicas", self.state),
                Route("/{path:path}", self.forward, methods=METHODS),
            ],
            middleware=middleware(self._settings),
            lifespan=lifespan,
        )


def merged_pages(pages: Sequence[tuple[str, str]], loads: Mapping[str, int]) -> str:
    """Return one page. Each sample gets a label `replica`, and each family its comments once.

    loads: the open requests of each replica, as the router counts them.
    """
    comments: dict[str, list[str]] = {}  # of each family, in order
    samples: dict[str, list[str]] = {}
    for replica, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif found := SAMPLE.match(line):
                name, labels, value = found.groups()
                labels = f'replica="{replica}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{labels}}} {value}")
    lines = [line for name in samples for line in [*comments.get(name, ()), *samples[name]]]
    lines += ["# TYPE ladder:router_open_requests gauge"]
    lines += [f'ladder:router_open_requests{{replica="{name}"}} {n}' for name, n in loads.items()]
    return "\n".join(lines) + "\n"
