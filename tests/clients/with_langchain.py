"""LangChain: chats, streams, tool calls in a loop, and embeddings."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def clock(zone: bool) -> str:
    """Tell the time; zone: in summer."""
    return "twelve o'clock" if zone else "one o'clock"


def chats(url: str, model: str) -> dict[str, Any]:
    """Return what a chat and an agent loop give."""
    plain: Any = ChatOpenAI(
        model=model,
        base_url=url,
        api_key="none",
        temperature=0,
        max_tokens=16,
    )
    answer = plain.invoke("Hello")
    found = {
        "chat": answer.content,
        "usage": answer.usage_metadata["output_tokens"],
        "stream": "".join(chunk.content for chunk in plain.stream("Hello")),
        "batch": [message.content for message in plain.batch(["Hello", "Bye"])],
    }
    agent: Any = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, max_tokens=99)
    messages: list[Any] = [HumanMessage("What time is it?")]
    call = agent.bind_tools([clock], tool_choice="any", parallel_tool_calls=False).invoke(messages)
    messages.append(call)
    for made in call.tool_calls:
        messages.append(ToolMessage(clock.invoke(made["args"]), tool_call_id=made["id"]))
    parts = agent.bind_tools([clock], tool_choice="clock").stream("What time is it?")
    whole = None
    for part in parts:
        whole = part if whole is None else whole + part
    last = plain.bind_tools([clock]).invoke(messages)
    streamed = [] if whole is None else [made["args"] for made in whole.tool_calls]
    calls = [{"name": made["name"], "args": made["args"]} for made in call.tool_calls]
    return found | {"calls": calls, "streamed": streamed, "last": last.content}


def embeddings(url: str, model: str) -> dict[str, Any]:
    """Return the vectors of 1,000 texts, which go into one call."""
    client = OpenAIEmbeddings(
        model=model,
        base_url=url,
        api_key="none",
        check_embedding_ctx_length=False,
    )
    vectors = client.embed_documents([f"text {i}" for i in range(1000)])
    return {"count": len(vectors), "first": vectors[0], "query": client.embed_query("text 0")}


if __name__ == "__main__":
    _, what, address, name = sys.argv
    sys.stdout.write(json.dumps({"chats": chats, "embeddings": embeddings}[what](address, name)))
