"""The bodies of API calls, and what they mean for the engine.

A name that is neither here nor a field of `SamplingParams` is refused, unless it can never change
an answer (`HARMLESS`), or its value asks for what the server does anyway (`NEUTRAL`). `null` is
the same as no value.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from common import SamplingParams
from common.validation import shown

from .electives import GRAMMAR_FIELDS, read_grammar, read_hint
from .errors import ApiError, refused
from .messages import conversation
from .prompts import prompts_of
from .tools import Tools, read_tools

# Fields of `SamplingParams` that a body may have, with the same names. The two APIs ask for log
# probabilities and for the length in different ways.
SAMPLING = {field.name for field in fields(SamplingParams)} - {
    "logprobs", "prompt_logprobs", "max_tokens", "structured_outputs",
}  # fmt: skip
# Names of OpenAI's and vLLM's APIs that never change an answer of this server. It stores nothing,
# and its models do not reason.
HARMLESS = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "request_id",
    "safety_identifier", "service_tier", "store", "verbosity",
}  # fmt: skip
# Values of other names that change nothing. A chat has more to say about tools.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
INTEGER = re.compile(r"0|[1-9][0-9]{0,18}")
MOST_TOP_LOGPROBS = 20  # as for a chat in OpenAI's API


class StreamOptions(BaseModel):
    """`stream_options` of both APIs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None  # it would hide the lengths of events


class Call(BaseModel):
    """What the bodies of both APIs have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Any = None
    agent_hint: dict[str, Any] | None = None

    def sampling_params(self, **own: Any) -> SamplingParams:
        """Return the sampling parameters. Raises `ValueError` or `ApiError` with the name.

        own: the parameters that the two APIs write differently; None: not given.
        """
        values = {name: value for name, value in own.items() if value is not None}
        given = self.model_extra or {}
        if (grammar := read_grammar(given)) is not None:
            if "structured_outputs" in values:
                raise ApiError(400, "give either tools or a grammar", param="tools")
            values["structured_outputs"] = grammar
        for name, value in given.items():
            if value is None:
                continue
            if name in SAMPLING:
                values[name] = _logit_bias(value) if name == "logit_bias" else value
            elif name not in GRAMMAR_FIELDS and not _is_neutral(name, value):
                raise refused(name, value, has_other_values=name in NEUTRAL)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", param="stream_options")
        return SamplingParams(**values)

    def options(self, known: Container[str]) -> dict[str, Any]:
        """Return what `add_request` gets besides the parameters. known: its arguments.

        Raises `ApiError` for a priority if the engine has none. An engine without hints ignores
        them, because a hint never changes an answer.
        """
        options: dict[str, Any] = {}
        if self.priority is not None:
            if "priority" in known:
                options["priority"] = self.priority
            elif not _is_neutral("priority", self.priority):
                raise refused("priority", self.priority, has_other_values=True)
        if self.agent_hint is not None:
            hint = read_hint(self.agent_hint)
            options |= {"agent_hint": hint} if "agent_hint" in known else {}
        return options

    @property
    def with_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def with_usage_so_far(self) -> bool:
        """Return whether each chunk of a stream has the usage up to it, as in vLLM."""
        options = self.stream_options
        return self.with_usage and options is not None and options.continuous_usage_stats is True


class CompletionCall(Call):
    """The body of `/v1/completions`. `prompt`: text, token ids, or a list of them."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def is_only_echo(self) -> bool:
        """Return whether the answer is the prompt, without any new token."""
        return self.echo is True and type(self.max_tokens) is int and self.max_tokens == 0

    def params(self) -> SamplingParams:
        """Return the sampling parameters of each prompt."""
        if (self.logprobs or 0) > MOST_TOP_LOGPROBS:
            raise ApiError(
                400, f"logprobs must be at most {MOST_TOP_LOGPROBS}, got {self.logprobs}",
                param="logprobs",
            )  # fmt: skip
        return self.sampling_params(
            max_tokens=1 if self.is_only_echo else self.max_tokens,  # an engine makes one or more
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    def prompts(self) -> list[Any]:
        """Return the prompts, one or many, each a string or token ids."""
        return prompts_of("prompt", self.prompt)


class ChatCall(Call):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the chat template
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def params(self, max_model_len: int) -> SamplingParams:
        """Return the sampling parameters. Without a limit, `max_model_len` is the limit."""
        limits = [x for x in (self.max_completion_tokens, self.max_tokens) if x is not None]
        if limits[1:] and limits[0] != limits[1]:
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them",
                param="max_tokens",
            )  # fmt: skip
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MOST_TOP_LOGPROBS:
            raise ApiError(
                400, f"top_logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got "
                f"{shown(self.top_logprobs)}", param="top_logprobs",
            )  # fmt: skip
        tools = self.read_tools()
        return self.sampling_params(
            max_tokens=limits[0] if limits else max_model_len,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_outputs=None if tools is None else tools.grammar(),
        )

    def read_tools(self) -> Tools | None:
        """Return the tools that the model may call, if there are any."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def conversation(self, *, has_tools: bool, has_images: bool = False) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them. has_...: whether the server has."""
        if self.tools and not has_tools:
            raise refused("tools", self.tools)
        return conversation(self.messages, has_tools=has_tools, has_images=has_images)


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


def _is_neutral(name: str, value: Any) -> bool:
    # `1 == True`, but a client that sends `true` for a number has made a mistake.
    return name in HARMLESS or any(
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
