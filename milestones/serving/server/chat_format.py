"""The bodies of `/v1/chat/completions`."""

from __future__ import annotations

import uuid
from typing import Any

from common import CompletionOutput

from .formats import LEAST_LOGPROB, Body, Format
from .token_bytes import TokenBytes
from .tool_parser import CallDelta, ToolParser
from .tools import Tools


class ChatFormat(Format):
    """The bodies of `/v1/chat/completions`. tools: those that the model may call; None for none."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, model: str, tokens: TokenBytes, num_top: int, tools: Tools | None = None
    ) -> None:
        super().__init__(model, tokens, num_top)
        self.tools = tools
        self.parsers: dict[int, ToolParser] = {}  # by choice

    def first_chunk(self, index: int) -> Body | None:
        start = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": start, "logprobs": None, "finish_reason": None}
        return self.body(self.chunk_object, [choice])

    def choice(self, index: int, delta: CompletionOutput) -> Body:
        content, calls = self._read(index, delta)
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = joined(calls)
        return {"index": index, "message": message, **self._end(index, delta)}

    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        content, calls = self._read(index, delta)
        parts: Body = {"content": content} if content else {}
        if calls:
            parts["tool_calls"] = [in_stream(call) for call in calls]
        return {"index": index, "delta": parts, **self._end(index, delta)}

    def _read(self, index: int, delta: CompletionOutput) -> tuple[str, list[CallDelta]]:
        """Divide the new text of a choice into content and tool calls."""
        if self.tools is None:
            return delta.text, []
        parser = self.parsers.setdefault(index, ToolParser())
        return parser.feed(delta.text, is_last=delta.finish_reason is not None)

    def _end(self, index: int, delta: CompletionOutput) -> Body:
        reason: str | None = delta.finish_reason
        if reason == "stop" and self.tools is not None and self.tools.ends_with_calls:
            parser = self.parsers[index]
            has_calls = parser.num_calls > 0 and not parser.is_in_call  # a stop string may cut one
            reason = "tool_calls" if has_calls else reason
        if delta.logprobs is None:
            return {"logprobs": None, "finish_reason": reason}
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        content = [
            {
                **self._entry(token_id, max(values[token_id], LEAST_LOGPROB)),
                "top_logprobs": [self._entry(*pair) for pair in self.top(values)],
            }
            for token_id, values in rows
        ]
        return {"logprobs": {"content": content}, "finish_reason": reason}

    def _entry(self, token_id: int, logprob: float) -> Body:
        data = list(self.tokens.of(token_id))
        return {"token": self.tokens.text(token_id), "logprob": logprob, "bytes": data}


def in_stream(delta: CallDelta) -> Body:
    """Return a part of a call as a stream has it: its id and its name come once, at its start."""
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.name is None:
        return {"index": delta.index, "function": function}
    function = {"name": delta.name, **function}
    return {"index": delta.index, "id": new_id(), "type": "function", "function": function}


def joined(deltas: list[CallDelta]) -> list[Body]:
    """Return whole calls."""
    calls: list[Body] = []
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": new_id(), "type": "function", "function": function})
        calls[-1]["function"]["arguments"] += delta.arguments
    return calls


def new_id() -> str:
    """Return the id of a call, with which the client says what the tool has answered."""
    return f"call_{uuid.uuid4().hex[:24]}"
