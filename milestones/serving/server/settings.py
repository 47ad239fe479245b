"""`ServerSettings`: the settings of the server. Those of the engine are in `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from common.validation import require_float, require_int, require_text


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the server. A wrong value raises `ValueError` that names the field and limit.

    host: the address to listen on. Other machines can only connect if it is not 127.0.0.1.
    port: the TCP port to listen on; 0 takes a free one.
    lora_modules: LoRA adapters to load, as name=folder, separated by commas. The `model` of a
        request may be one of these names. Only an engine with adapters can serve them.
    served_model_name: the name of the model in requests and answers. None: that of the model.
    api_key: refuse calls without this key (`Authorization: Bearer ...`). None: the environment
        variable LLM_LADDER_API_KEY; without it, no key is needed.
    max_open_requests: the maximum number of requests that wait or run at the same time. Further
        ones are answered with status 429.
    max_body_bytes: the maximum size of the body of a call. Larger ones get status 413.
    max_prompt_tokens: the maximum number of tokens of a prompt. None: `max_model_len` decides.
    max_connections: the maximum number of open connections. Further ones get status 503.
    body_timeout: the maximum number of seconds in which the body of a call must arrive.
    drain_timeout: after SIGTERM, open requests get this many seconds to finish.
    live_page: serve the live page at `/`. It shows the prompts and answers of all clients to
        everyone with the API key, or to everyone if there is no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    lora_modules: str | None = None
    served_model_name: str | None = None
    api_key: str | None = None
    max_open_requests: int = 256
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_connections: int = 2048
    body_timeout: float = 30.0
    drain_timeout: float = 30.0
    live_page: bool = True

    def __post_init__(self) -> None:
        require_text("host", self.host)
        require_int("port", self.port, low=0, high=65535)
        for field in ("lora_modules", "served_model_name", "api_key"):
            if getattr(self, field) is not None:
                require_text(field, getattr(self, field))
        for field in ("max_open_requests", "max_body_bytes", "max_connections"):
            require_int(field, getattr(self, field), low=1)
        require_int("max_prompt_tokens", self.max_prompt_tokens, low=1, optional=True)
        for field in ("body_timeout", "drain_timeout"):
            require_float(field, getattr(self, field), low=0.0)
