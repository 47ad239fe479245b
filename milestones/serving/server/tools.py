"""`Tools`: the functions that a chat may call, and the grammar that makes each call a valid one.

    client       tools, tool_choice            tool_calls of the answer
                   |                                 ^
    server       the chat template shows them      `ToolParser` finds the calls
                 a grammar for the output            ^
    engine         +--> text <tool_call>{...}</tool_call>

The model decides whether and what to call. It cannot write a call that the client could not run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import LLMEngine, StructuredOutputsParams
from common.validation import require_list, shown

from .errors import ApiError
from .settings import HERMES, ServerSettings
from .tool_parser import BEGIN, END, MARKER

MOST_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True)
class Tools:
    """The functions of one call.

    given: as the client has sent them; the chat template gets them. names: that the model may call.
    must_call: the answer begins with a call. is_parallel: it may have several.
    ends_with_calls: an answer with calls has the finish reason `tool_calls`. In OpenAI's API, this
        is not so if the client has chosen the function.
    """

    given: Sequence[dict[str, Any]]
    names: Sequence[str]
    must_call: bool
    is_parallel: bool
    ends_with_calls: bool

    def grammar(self) -> StructuredOutputsParams:
        """Return the grammar of the output: text, and calls with arguments by their schema."""
        tags = [
            {
                "begin": BEGIN % function["name"],
                "content": {
                    "type": "json_schema",
                    "json_schema": ANY_ARGUMENTS | (function.get("parameters") or {}),
                },
                "end": END,
            }
            for function in (tool["function"] for tool in self.given)
            if function["name"] in self.names
        ]
        form = {
            "type": "triggered_tags",
            "triggers": [MARKER],
            "tags": tags,
            "at_least_one": self.must_call,
            "stop_after_first": not self.is_parallel,
        }
        try:
            return StructuredOutputsParams(
                structural_tag={"type": "structural_tag", "format": form}
            )
        except ValueError as error:
            reason = str(error).removeprefix("structured_outputs: structural_tag")
            raise ApiError(400, f"tools{reason}", param="tools") from error


def read_tools(given: Any, choice: Any, is_parallel: bool | None) -> Tools | None:
    """Return the tools of a call, or None if the model must not call any.

    given: `tools` of the body. choice: `tool_choice`. Raises `ApiError` with the name of the field.
    """
    if not given:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    require_list("tools", given, "tools", most=MOST_TOOLS)
    names = [_name_of(tool, i) for i, tool in enumerate(given)]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools must have different names", param="tools")
    if choice == "none":
        return None
    chosen = names
    if choice not in (None, "auto", "required"):
        chosen = [_chosen(choice, names)]
    is_named = chosen is not names
    return Tools(
        given,
        chosen,
        must_call=is_named or choice == "required",
        is_parallel=not is_named and is_parallel is not False,
        ends_with_calls=not is_named,
    )


def _name_of(tool: Any, number: int) -> str:
    """Return the name of a tool. Raises `ApiError` if it is no function in OpenAI's form."""
    place = f"tools.{number}"
    if not isinstance(tool, dict) or tool.get("type") != "function" or tool.keys() - {
        "type", "function",
    }:  # fmt: skip
        raise ApiError(
            400, f"{place} must have the type 'function' and a function, got {shown(tool)}",
            param="tools",
        )  # fmt: skip
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400, f"{place}.function.name must be 1 to 64 letters, digits, '_' or '-', got "
            f"{shown(name)}", param="tools",
        )  # fmt: skip
    assert isinstance(function, dict), "only a function has a name"
    if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
        raise ApiError(400, f"{place}.function.{min(unknown)} is not supported", param="tools")
    if not isinstance(function.get("description") or "", str):
        raise ApiError(400, f"{place}.function.description must be a string", param="tools")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError(
            400, f"{place}.function.parameters must be the JSON schema of an object, got "
            f"{shown(parameters)}", param="tools",
        )  # fmt: skip
    return name


def _chosen(choice: Any, names: Sequence[str]) -> str:
    """Return the name of the function that the client has chosen."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or name not in names:
        raise ApiError(
            400, "tool_choice must be 'none', 'auto', 'required', or a function of tools, got "
            f"{shown(choice)}", param="tool_choice",
        )  # fmt: skip
    return str(name)


def read_template(engine: LLMEngine, settings: ServerSettings) -> str | None:
    """Return the chat template of the settings; None for that of the model.

    Raises `ValueError`, which names the setting, if it cannot be used, or if it shows no tools to
    the model and the settings ask for tools.
    """
    template = None
    if settings.chat_template is not None:
        try:
            template = Path(settings.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ValueError(f"chat_template: {settings.chat_template}: {error}") from None
        rendered(engine.loaded.tokenizer, template, None)
    if settings.tool_call_parser is None:
        return template
    if (refusal := engine.input_processor.no_structured_outputs) is not None:
        raise ValueError(f"tool_call_parser: {refusal}")
    function = {"name": "probe_of_tools", "description": "", "parameters": ANY_ARGUMENTS}
    tools = [{"type": "function", "function": function}]
    if "probe_of_tools" not in rendered(engine.loaded.tokenizer, template, tools):
        raise ValueError(
            "tool_call_parser: the chat template of this model shows no tools; for a model with "
            f"ChatML, start with --chat-template {HERMES}"
        )
    return template


def rendered(tokenizer: Any, template: str | None, tools: list[Any] | None) -> str:
    """Return a short chat as a template writes it. Raises `ValueError` if it cannot."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": "text"}], tools=tools, chat_template=template,
                tokenize=False, add_generation_prompt=True,
            )
        )  # fmt: skip
    except Exception as error:  # a template is a program
        raise ValueError(f"chat_template: it cannot write a chat: {str(error)[:300]}") from error
