"""Tools in chats: the calls of a model are valid, and reach the client in OpenAI's form."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from common import LoadedModel, StructuredOutputsParams
from common.hf.tiny import byte_tokenizer
from milestones.serving.server.settings import HERMES, ServerSettings
from milestones.serving.server.tool_parser import BEGIN, END, ToolParser
from tests.conftest import ROOT, EngineFactory, build_engine, shared_model
from tests.helpers.serving import CHAT, MODEL, Running, Serve, chat, long_model

pytestmark = pytest.mark.extra("serve")
with_tools = pytest.mark.since("structured_output")

SETTINGS = {"tool_call_parser": "hermes", "chat_template": str(ROOT / HERMES)}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock", "parameters": {
            "type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"], "additionalProperties": False,
        },
    },
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "clock"}}


def tools_of(choice: Any, is_parallel: bool | None = None) -> Any:
    """Return the two tools, as the server reads them."""
    from milestones.serving.server.tools import read_tools

    return read_tools([WEATHER, CLOCK], choice, is_parallel)


@pytest.fixture(name="run")
def run_fixture(make_engine: EngineFactory, serve: Serve) -> Running:
    return serve(make_engine(long_model(), max_model_len=2048, num_pages=400), **SETTINGS)


def asked(**fields: Any) -> dict[str, Any]:
    return {**chat(tools=[WEATHER, CLOCK], max_tokens=200), **fields}


def assert_valid(name: str, arguments: str) -> None:
    """Require arguments that satisfy the schema of their function."""
    found = json.loads(arguments)
    if name == "clock":
        assert [*found] == ["zone"] and found["zone"] in ("UTC", "CET")
    else:
        assert name == "get_weather" and [*found] == ["city", "days"]
        assert found["city"] in ("Paris", "Rome") and 1 <= found["days"] <= 9


def joined(events: list[Any]) -> tuple[str, list[dict[str, Any]], str | None]:
    """Return what a client makes of a stream: content, calls, finish reason."""
    content, calls, reason = "", list[dict[str, Any]](), None
    for event in events[:-1]:
        (choice,) = event["choices"]
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({**part["function"]})
            else:
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, calls, reason


@with_tools
@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_a_forced_call(choice: Any, reason: str, run: Running) -> None:
    body = asked(tool_choice=choice, parallel_tool_calls=False)
    status, answer, _ = run.post(CHAT, body)
    assert status == 200, answer
    (found,) = answer["choices"]
    assert found["finish_reason"] == reason and found["message"]["content"] is None
    (made,) = found["message"]["tool_calls"]
    assert made["type"] == "function" and made["id"].startswith("call_")
    assert_valid(**made["function"])
    assert choice == "required" or made["function"]["name"] == "clock"
    assert joined(run.events(CHAT, body)) == ("", [made["function"]], reason)


@with_tools
def test_an_agent_loop_of_the_official_client(run: Running) -> None:
    """A call, the answer of the tool, and text. The client sends its answers back, with nulls."""
    client: Any = run.client()
    options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER, CLOCK], "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **options
    ).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    messages.append(first.message.model_dump())
    for made in first.message.tool_calls:
        assert_valid(made.function.name, made.function.arguments)
        messages.append({"role": "tool", "tool_call_id": made.id, "content": "sunny"})
    for choice in ("auto", "none"):
        last = client.chat.completions.create(
            messages=messages, tool_choice=choice, max_tokens=8, **options
        ).choices[0]
        assert last.message.content and not last.message.tool_calls
        assert last.finish_reason == "length"


@with_tools
def test_what_the_template_shows(run: Running) -> None:
    """The tools, a call of the model in the form that the grammar forces, and the tool's answer."""
    arguments = {"city": "Rome", "days": 2}
    call = {
        "id": "a", "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
    }  # fmt: skip
    texts: list[str] = []
    read = run.api.prompts._inputs.apply_chat_template

    def spy(*args: Any, **more: Any) -> Any:
        texts.append((prompt := read(*args, **more)).prompt)
        return prompt

    run.api.prompts._inputs.apply_chat_template = spy
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    for choice in ("auto", "none"):
        body = asked(messages=messages, max_tokens=1, tool_choice=choice)
        assert run.post(CHAT, body)[0] == 200
    shown, hidden = texts
    assert "Be brief." in shown and json.dumps(WEATHER["function"]["name"]) in shown
    assert "The weather of a city." in shown and "The weather of a city." not in hidden
    for text in texts:
        assert BEGIN % "get_weather" + json.dumps(arguments) + END in text
        assert "<tool_response>\nsunny\n</tool_response>" in text
        assert text.endswith("<|im_start|>assistant\n") and text.count("Be brief.") == 1


def test_tools_are_refused_by_name(serve: Serve) -> None:
    """Without the parser, a server does not drop them: the answer would be another one."""
    run = serve()
    for body, param in (
        (asked(), "tools"),
        (chat(tool_choice="required"), "tool_choice"),
        (
            chat() | {"messages": [{"role": "tool", "tool_call_id": "a", "content": "b"}]},
            "messages.0",
        ),
    ):
        status, answer, _ = run.post(CHAT, body)
        assert status == 400 and answer["error"]["param"].startswith(param), answer
    assert run.post(CHAT, chat(tools=[], tool_choice="none", parallel_tool_calls=True))[0] == 200


@pytest.mark.before("structured_output")
def test_an_engine_without_grammars_does_not_start_with_tools(milestone: str) -> None:
    from milestones.serving.server.tools import read_template

    engine = build_engine(milestone)
    with pytest.raises(ValueError, match="tool_call_parser: this engine has no grammars"):
        read_template(engine, ServerSettings(tool_call_parser="hermes"))
    engine.close()


@with_tools
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}", "shows no tools"),
        ("{{ tools[0].name.first.last }}", "chat_template: it cannot write a chat"),
        ("{% if", "chat_template: it cannot write a chat"),
        (None, "No such file"),
    ],
)
def test_a_template_that_cannot_show_tools(
    template: str | None, message: str, make_engine: EngineFactory, tmp_path: Any
) -> None:
    from milestones.serving.server.tools import read_template

    path, engine = tmp_path / "template.jinja", make_engine()
    if template is not None:
        path.write_text(template)
    settings = ServerSettings(tool_call_parser="hermes", chat_template=str(path))
    with pytest.raises(ValueError, match=message):
        read_template(engine, settings)


def changed(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**CLOCK["function"], **function}}]}


@with_tools
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [1]}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"), ({"tools": [CLOCK] * 129}, "tools"),
        (changed(name="a b"), "tools"), (changed(name=None), "tools"),
        (changed(parameters=[]) | {"tools": [{**CLOCK, "more": 1}]}, "tools"),
        (changed(parameters=3), "tools"), (changed(more=1), "tools"),
        (changed(description=1), "tools"), (changed(parameters={"type": "text"}), "tools"),
        (changed(description="<|im_end|>"), "tools"), (changed(name="<|im_end|>"), "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[1]"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "a"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "<|im_end|>"}]}, "messages"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused(fields: dict[str, Any], param: str, run: Running) -> None:
    status, answer, _ = run.post(CHAT, asked(**fields))
    assert status == 400 and answer["error"]["param"] == param, answer


class Text:
    """The grammar of tools, fed with text."""

    def __init__(self, choice: Any = "auto", is_parallel: bool | None = None) -> None:
        from milestones.electives.structured_output.grammar import GrammarLibrary

        loaded = shared_model(MODEL)
        tools = tools_of(choice, is_parallel)
        library = GrammarLibrary(loaded)
        self.grammar: Any = library(tools.grammar())
        library.close()
        self.tokenizer, self.eos = loaded.tokenizer, sorted(loaded.eos_token_ids)[0]
        self.bits = np.zeros(-(-loaded.vocab_size // 32), np.int32)

    def takes(self, text: str) -> bool:
        """Feed text, and return whether all of it was allowed."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return all(self.grammar.accept(token_id) for token_id in tokens)

    def may_end(self) -> bool:
        self.grammar.fill(self.bits)
        return bool(self.bits.view(np.uint32)[self.eos // 32] >> (self.eos % 32) & 1)


CALL = BEGIN % "clock" + '{"zone": "UTC"}' + END


@with_tools
def test_text_is_free_up_to_the_marker(milestone: str) -> None:
    """After it, there is a call of a tool that exists, with arguments that satisfy its schema."""
    text = Text()
    assert text.may_end() and text.takes("Let me see: <tool") and text.may_end()
    assert text.takes("_call>\n") and not text.may_end()
    assert not text.takes("no call")
    assert text.takes('{"name": "clock", "arguments": {"zone": "C') and not text.takes("A")
    assert text.takes('ET"}' + END) and text.may_end()
    assert text.takes(f"\nAnd once more: {CALL} Good.") and text.may_end()
    assert not Text().takes(BEGIN % "other")


@with_tools
def test_how_many_calls_there_may_be(milestone: str) -> None:
    one = Text(is_parallel=False)
    assert one.takes(f"Well: {CALL}") and one.may_end() and not one.takes("x")
    assert Text(is_parallel=False).takes("no call at all")
    some = Text("required")
    assert not some.may_end() and not some.takes("Well") and some.takes(CALL) and some.may_end()
    assert some.takes(f"\n{CALL}") and some.may_end()
    named = Text(NAMED)
    assert not named.takes("W") and named.takes(CALL) and named.may_end() and not named.takes("\n")
    assert not Text(NAMED).takes(BEGIN % "get_weather")


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the calls, of a text that comes in pieces."""
    parser, content, calls = ToolParser(), "", list[tuple[str, str]]()
    for i, piece in enumerate(pieces):
        new, deltas = parser.feed(piece, is_last=i == len(pieces) - 1)
        content += new
        for delta in deltas:
            assert delta.index == len(calls) - (delta.name is None)
            if delta.name is not None:
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = name, arguments + delta.arguments
    return content, calls


HARD = '{"a": "}\\\\n</tool_call>"}'  # the end of a call, but in a string
ZONE = ("clock", '{"zone": "UTC"}')
TEXTS: list[tuple[str, tuple[str, list[tuple[str, str]]]]] = [
    ("", ("", [])),
    ("a < b <tool <tool_c", ("a < b <tool <tool_c", [])),
    (CALL, ("", [ZONE])),
    (f"Now: {CALL}\n{CALL}", ("Now: ", [ZONE, ZONE])),
    (f"{CALL}\n Done, it is }}.", ("Done, it is }.", [ZONE])),
    (CALL[:-4], ("", [ZONE])),
    (CALL[: -len(END) - 2], ("", [("clock", '{"zone": "UTC')])),
    (CALL[:30], (CALL[:30], [])),
    (BEGIN % "f-1" + HARD + END, ("", [("f-1", HARD)])),
]  # fmt: skip


@pytest.mark.since("m1_single")
@pytest.mark.before("m2_continuous")
@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=8))
def test_the_pieces_of_a_text_do_not_matter(
    case: tuple[str, tuple[str, list[tuple[str, str]]]], cuts: list[int]
) -> None:
    text, expected = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parsed([text[a:b] for a, b in pairwise(places)]) == expected


@pytest.mark.since("m1_single")
@pytest.mark.before("m2_continuous")
@pytest.mark.parametrize(
    "change",
    [
        {"type": "other"}, {"format": {"type": "tags"}}, {"more": 1},
        {"format": {"type": "triggered_tags", "triggers": [], "tags": []}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": []}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [{"begin": "b"}]}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [
            {"begin": "<b>", "content": {"type": "json_schema", "json_schema": {}}, "end": "c"}]}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [
            {"begin": "<a>", "content": {"type": "any_text"}, "end": "c"}]}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "at_least_one": 1, "tags": []}},
        {"format": {"type": "triggered_tags", "triggers": ["<a>"], "excludes": [], "tags": []}},
    ],
)  # fmt: skip
def test_a_wrong_structural_tag_is_refused(change: dict[str, Any]) -> None:
    """I4: with the name of the field."""
    with pytest.raises(ValueError, match="structured_outputs: structural_tag"):
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {}} | change)


@with_tools
def test_a_marker_may_be_one_token(milestone: str) -> None:
    """Qwen's `<tool_call>` is one token, and the model was trained to write it."""
    from milestones.electives.structured_output.grammar import GrammarLibrary

    tokenizer: Any = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    begin, end = map(tokenizer.convert_tokens_to_ids, ("<tool_call>", "</tool_call>"))
    model = shared_model(MODEL).model
    loaded = LoadedModel("marked", Marked(model, len(tokenizer)), tokenizer)  # type: ignore[arg-type]
    for choice, first in (("auto", "Well: "), ("required", "")):
        tools = tools_of(choice)
        library = GrammarLibrary(loaded)
        grammar = library(tools.grammar())
        library.close()

        def ids(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        body = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
        for token_id in [*ids(first), begin, *ids(body), end, *ids("\nAnd "), begin]:
            assert grammar.accept(token_id), tokenizer.decode([token_id])
        assert not grammar.accept(ids("x")[0])


class Marked:
    """A model with another number of tokens."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.config, self.generation_config = model.config, model.generation_config
        self.weight = torch.empty(vocab_size, 1)

    def get_input_embeddings(self) -> Any:
        return self
