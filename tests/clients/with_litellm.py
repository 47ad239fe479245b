"""LiteLLM: chats, streams, tool calls and completions."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object", "properties": {"summer": {"type": "boolean"}}, "required": ["summer"],
        },
    },
}  # fmt: skip


def main(url: str, model: str) -> dict[str, Any]:
    """Return what the calls give."""
    options: dict[str, Any] = {
        "model": f"openai/{model}", "api_base": url, "api_key": "none", "temperature": 0,
        "messages": [{"role": "user", "content": "Hello"}],
    }  # fmt: skip
    whole = litellm.completion(max_tokens=16, **options)
    stream = litellm.completion(max_tokens=16, stream=True, **options)
    forced = litellm.completion(
        max_tokens=99, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False, **options
    )
    made = forced.choices[0].message.tool_calls[0].function
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=url, api_key="none", prompt="Hello",
        max_tokens=16, temperature=0,
    )  # fmt: skip
    return {
        "chat": whole.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "call": {"name": made.name, "args": json.loads(made.arguments)},
        "text": text.choices[0].text,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
