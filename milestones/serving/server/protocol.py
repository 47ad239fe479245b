"""The bodies of API calls, and what they mean for the engine.

Nothing is ignored: a name that is neither here nor a field of `SamplingParams` is refused, unless
its value asks for what the server does anyway (`NEUTRAL`).
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict

from common import SamplingParams
from common.validation import shown

from .electives import GRAMMAR_FIELDS, read_grammar
from .errors import ApiError
from .prompts import prompts_of

# Fields of `SamplingParams` that a body may have, with the same names. The two APIs ask for log
# probabilities and for the length in different ways.
SAMPLING = {field.name for field in fields(SamplingParams)} - {
    "logprobs", "max_tokens", "structured_outputs",
}  # fmt: skip
# Values of other names that change nothing. `user` never changes an answer.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "priority": (0,),
}
INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")
MOST_TOP_LOGPROBS = 20  # of a chat, as in OpenAI's API


class StreamOptions(BaseModel):
    """`stream_options` of both APIs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class Call(BaseModel):
    """What the bodies of both APIs have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Any = None

    def sampling_params(self, **own: Any) -> SamplingParams:
        """Return the sampling parameters. Raises `ValueError` or `ApiError` with the name.

        own: the parameters that the two APIs write differently; None: not given.
        """
        values = {name: value for name, value in own.items() if value is not None}
        given = self.model_extra or {}
        if (grammar := read_grammar(given)) is not None:
            values["structured_outputs"] = grammar
        for name, value in given.items():
            if name in SAMPLING:
                if value is not None:
                    values[name] = _logit_bias(value) if name == "logit_bias" else value
            elif name not in GRAMMAR_FIELDS and not _is_neutral(name, value):
                raise refused(name, value)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return SamplingParams(**values)

    def options(self, has_priorities: bool) -> dict[str, Any]:
        """Return what `add_request` gets besides the parameters.

        Raises `ApiError` for a priority if the engine has none.
        """
        if has_priorities and self.priority is not None:
            return {"priority": self.priority}
        if not _is_neutral("priority", self.priority):
            raise refused("priority", self.priority)
        return {}

    @property
    def with_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class CompletionCall(Call):
    """The body of `/v1/completions`. `prompt`: text, token ids, or a list of them."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters of each prompt."""
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400, "echo with logprobs: log probabilities of prompts are not supported",
                param="echo",
            )  # fmt: skip
        return self.sampling_params(max_tokens=self.max_tokens, logprobs=self.logprobs)

    def prompts(self) -> list[Any]:
        """Return the prompts, one or many, each a string or token ids."""
        return prompts_of("prompt", self.prompt)


class ChatCall(Call):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self, max_model_len: int) -> SamplingParams:
        """Return the sampling parameters. Without a limit, `max_model_len` is the limit."""
        limits = [x for x in (self.max_completion_tokens, self.max_tokens) if x is not None]
        if limits[1:] and limits[0] != limits[1]:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them",
                param="max_tokens",
            )  # fmt: skip
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MOST_TOP_LOGPROBS:
            raise ApiError(
                400, f"top_logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got "
                f"{shown(self.top_logprobs)}", param="top_logprobs",
            )  # fmt: skip
        return self.sampling_params(
            max_tokens=limits[0] if limits else max_model_len,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages with plain text as content, as chat templates take them."""
        return [_message(message, i) for i, message in enumerate(self.messages)]


class TokenizeCall(BaseModel):
    """The body of `/tokenize`: a prompt or messages."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeCall(BaseModel):
    """The body of `/detokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Any


def refused(name: str, value: Any) -> ApiError:
    """Return the error for a parameter that the server does not have, or not with this value."""
    with_value = f" with the value {shown(value)}" if name in NEUTRAL else ""
    return ApiError(
        400, f"{shown(name)} is not supported by this server{with_value}",
        param=name[:80], code="unsupported_parameter",
    )  # fmt: skip


def _is_neutral(name: str, value: Any) -> bool:
    # `1 == True`, but a client that sends `true` for a number has made a mistake.
    return (value is None and name in NEUTRAL) or any(
        value == known and isinstance(value, bool) == isinstance(known, bool)
        for known in NEUTRAL.get(name, ())
    )


def _logit_bias(value: Any) -> dict[int, Any]:
    """Return `logit_bias` with token ids as keys. In JSON, the keys are strings."""
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias must be an object, got {shown(value)}")
    for key in value:
        if not INTEGER.fullmatch(key):
            raise ValueError(f"logit_bias: its keys must be token ids, got {shown(key)}")
    return {int(key): bias for key, bias in value.items()}


def _message(message: dict[str, Any], number: int) -> dict[str, str]:
    for name, value in message.items():
        if name not in ("role", "content", "name") and value:
            raise refused(f"messages.{number}.{name}", value)
    kept = {name: message[name] for name in ("role", "name") if message.get(name) is not None}
    if not isinstance(kept.get("name", ""), str):
        raise ValueError(f"messages: name must be a string, got {shown(kept['name'])}")
    return {**kept, "content": _text_of(message.get("content"), number)}


def _text_of(content: Any, number: int) -> Any:
    """Return the text of a content that may be a list of text parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() - {
            "type", "text",
        } or not isinstance(part.get("text"), str):  # fmt: skip
            raise ApiError(
                400, f"messages.{number}.content: only parts of type 'text' are supported, got "
                f"{shown(part)}", param="messages",
            )  # fmt: skip
        texts.append(part["text"])
    return "".join(texts)
