"""The messages of a chat, as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

from common.validation import shown

from .errors import ApiError, refused


def conversation(
    messages: list[dict[str, Any]], *, has_tools: bool, has_images: bool = False
) -> list[dict[str, Any]]:
    """Return messages with plain text as content, and with the arguments of calls as objects.

    A content with images stays a list of parts. has_tools: whether messages may have tool calls,
    and the answers of tools. has_images: whether the engine takes images.
    """
    return [_message(message, i, has_tools, has_images) for i, message in enumerate(messages)]


def _message(
    message: dict[str, Any], number: int, has_tools: bool, has_images: bool
) -> dict[str, Any]:
    """Return a message for the chat template, with its other keys as variables of the template.

    An answer of a model may have no content.
    """
    of_tools = ("tool_calls", "tool_call_id") if not has_tools else ()
    for name in (*of_tools, "function_call", "audio"):
        if message.get(name):
            raise refused(f"messages.{number}.{name}", message[name])
    kept = {name: value for name, value in message.items() if value not in (None, [], {})}
    if kept.get("type") == "text":  # lm-eval writes it into each message
        del kept["type"]
    for name in ("name", "tool_call_id"):
        if not isinstance(kept.get(name, ""), str):
            raise ValueError(f"messages: {name} must be a string, got {shown(kept[name])}")
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls(kept["tool_calls"], f"messages.{number}.tool_calls")
    content = _content_of(message.get("content"), number, has_images)
    if content is None and kept.get("role") == "assistant":
        content = ""
    return {**kept, "content": content}


def _calls(given: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of an earlier answer. Templates take their arguments as an object."""
    calls = []
    for call in given if isinstance(given, list) else [given]:
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (
            (function.get("name"), function.get("arguments")) if isinstance(function, dict)
            else (None, None)
        )  # fmt: skip
        try:
            arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ApiError(
                400, f"{place} must have a function with a name, and with arguments as the text of "
                f"a JSON object, got {shown(call)}", param="messages",
            )  # fmt: skip
        calls.append({**call, "function": {"name": name, "arguments": arguments}})
    return calls


def _content_of(content: Any, number: int, has_images: bool) -> Any:
    """Return the text of a content that may be a list of parts; the parts, if one is an image."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not _is_text(part) and not (has_images and _is_image(part)):
            kinds = "'text' and 'image_url' are" if has_images else "'text' are"
            raise ApiError(
                400, f"messages.{number}.content: only parts of type {kinds} supported, got "
                f"{shown(part)}", param="messages",
            )  # fmt: skip
    if all(map(_is_text, content)):
        return "".join(part["text"] for part in content)
    return content


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and part.keys() <= {"type", "text", "cache_control"}
        and isinstance(part.get("text"), str)
    )


def _is_image(part: Any) -> bool:
    """Return whether this is an image. `detail` changes nothing here, as in vLLM."""
    return (
        isinstance(part, dict)
        and part.get("type") == "image_url"
        and part.keys() <= {"type", "image_url", "cache_control"}
        and isinstance(url := part.get("image_url"), dict)
        and url.keys() <= {"url", "detail"}
    )
