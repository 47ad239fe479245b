"""`ServerSettings`: the settings of the server. Those of the engine are in `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from common.validation import require_choice, require_float, require_int, require_text

TOOL_CALL_PARSERS = ("hermes",)
HERMES = "milestones/serving/server/hermes.jinja"  # a chat template for models with ChatML


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the server. A wrong value raises `ValueError` that names the field and limit.

    host: the address to listen on. Other machines can only connect if it is not 127.0.0.1.
    port: the TCP port to listen on; 0 takes a free one.
    lora_modules: LoRA adapters to load, as name=folder, separated by commas. The `model` of a
        request may be one of these names. Only an engine with adapters can serve them.
    chat_template: a file with a chat template, in place of the model's own. None: the model's own.
    tool_call_parser: hermes: chats may have `tools`, and calls have the format of Hermes. It needs
        an engine with grammars, and a chat template that shows tools. None: no tools.
    served_model_name: the name of the model in requests and answers. None: that of the model.
    allowed_hosts: more names that clients may call the server by, separated by commas; `*.name` for
        all names below it. IP addresses, `localhost` and `host` are always allowed.
    allowed_origins: sites with pages that may use the server in a browser, such as
        https://chat.example, separated by commas. None: only its own page.
    prefix_cache_route: serve `POST /reset_prefix_cache`, which empties the prefix cache.
    api_key: refuse calls without this key (`Authorization: Bearer ...`). None: the environment
        variable LLM_LADDER_API_KEY; without it, no key is needed.
    max_open_requests: the maximum number of requests that wait or run at the same time. Further
        ones are answered with status 429.
    max_body_bytes: the maximum size of the body of a call. Larger ones get status 413.
    max_buffered_bytes: the maximum size of the bodies of all open calls together. More get 503.
    max_image_bytes: the maximum memory of the processed images of all open calls. More get 503.
    max_prompt_tokens: the maximum number of tokens of a prompt. None: `max_model_len` decides.
    max_connections: the maximum number of open connections. For a new one, the connection that has
        waited longest for a call is closed. If all have calls, further calls get status 503.
    header_timeout: the maximum number of seconds in which the header of a call must arrive, from
        its first byte. The first one of a connection: from the start of the connection.
    body_timeout: the maximum number of seconds in which the body of a call must arrive.
    write_timeout: a client that reads nothing of its answer for so many seconds is cut off.
    drain_timeout: after SIGTERM, open requests get this many seconds to finish.
    live_page: serve the live page at `/`. It shows the prompts and answers of all clients to
        everyone with the API key, or to everyone if there is no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    lora_modules: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    allowed_hosts: str | None = None
    allowed_origins: str | None = None
    prefix_cache_route: bool = False
    max_open_requests: int = 256
    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 256 << 20
    max_image_bytes: int = 1 << 30
    max_prompt_tokens: int | None = None
    max_connections: int = 2048
    header_timeout: float = 20.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0
    live_page: bool = True

    def __post_init__(self) -> None:
        require_text("host", self.host)
        require_int("port", self.port, low=0, high=65535)
        texts = ("lora_modules", "served_model_name", "api_key", "allowed_hosts", "allowed_origins")
        for field in (*texts, "chat_template"):
            if getattr(self, field) is not None:
                require_text(field, getattr(self, field))
        require_choice("tool_call_parser", self.tool_call_parser, (None, *TOOL_CALL_PARSERS))
        sizes = ("max_body_bytes", "max_buffered_bytes", "max_image_bytes")
        for field in (*sizes, "max_open_requests", "max_connections"):
            require_int(field, getattr(self, field), low=1)
        require_int("max_prompt_tokens", self.max_prompt_tokens, low=1, optional=True)
        for field in ("header_timeout", "body_timeout", "write_timeout", "drain_timeout"):
            require_float(field, getattr(self, field), low=0.0)
