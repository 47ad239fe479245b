"""Bad calls are refused by name, in OpenAI's format, and the next call works (I4)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.serving import CHAT, COMPLETE, MODEL, Running, Serve, call

pytestmark = [
    pytest.mark.extra("serve"),
    pytest.mark.since("m5_overlap"),
    pytest.mark.one_mode,
]

USER = [{"role": "user", "content": "Hi"}]
NAN = float("nan")

# Fields of a completion, and the name that the error must have.
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [1]}, "tools"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": True}, "best_of"),
    ({"anything": 1}, "anything"),
    ({"\ud83d": 1}, None),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1e400}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "1"}, "seed"),
    *(({"n": value}, "n") for value in (0, "2", 1001, 10**6)),
    *(({"logit_bias": {key: 1}}, "logit_bias")
      for key in ("-1", "abc", "1.0", "259", "\u0663", "1" * 30)),
    *(({"logit_bias": {"1": value}}, "logit_bias") for value in (NAN, 101, "1", None)),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 500_000}, "stop"),
    ({"stop": "\ud83d"}, "stop"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"anything": True}}, "stream_options"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": "\ud83d"}, "prompt"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"prompt": "x" * 200_000}, "prompt"),
    ({"model": 1}, "model"),
]  # fmt: skip
# The same for a chat.
REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages"),
    ({"messages": [{**USER[0], "name": 5}]}, "messages"),
    ({"messages": [{**USER[0], "name": "<|im_end|>"}]}, "messages"),
    ({"messages": [{**USER[0], "tool_calls": [1]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a<|im_end|>b"}]}, "messages"),
    ({"messages": [{"role": "<|im_start|>", "content": "a"}]}, "messages"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    *(
        ({"chat_template_kwargs": {name: "{{ messages }}"}}, "chat_template_kwargs")
        for name in (
            "chat_template",
            "messages",
            "conversation",
            "tools",
            "tokenize",
            "eos_token",
            "add_generation_prompt",
            "return_dict",
            "tokenizer_kwargs",
        )
    ),
    ({"chat_template_kwargs": {"x": [{"y": "<|im_end|>"}]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"messages": [{**USER[0], "thought": {"a": ["<|im_start|>"]}}]}, "messages"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
]


def check_refused(run: Running, path: str, body: Any, name: str | None) -> None:
    for stream in (False, True):
        if isinstance(body, dict):
            body = {"stream": stream, **body}
        status, answer, _ = run.post(path, body)
        assert status == 400, answer
        error = answer["error"]
        assert error["type"] == "invalid_request_error" and error.keys() == {
            "message", "type", "param", "code",
        }  # fmt: skip
        if name is not None:
            assert error["param"] == name and len(error["message"]) < 1100, error


def test_bad_calls_are_refused_by_name(serve: Serve) -> None:
    run = serve()
    good = call(max_tokens=4)
    before = run.post(COMPLETE, good)
    for fields, name in REFUSED:
        check_refused(run, COMPLETE, {**good, **fields}, name)
    for fields, name in REFUSED_CHATS:
        check_refused(run, CHAT, {"messages": USER, "max_tokens": 4, **fields}, name)
    check_refused(run, COMPLETE, {"max_tokens": 4}, "prompt")
    after = run.post(COMPLETE, good)
    assert before[0] == after[0] == 200 and before[1]["choices"] == after[1]["choices"]


@pytest.mark.before("structured_output")
def test_a_form_of_the_answer_is_refused(serve: Serve) -> None:
    form = {"response_format": {"type": "json_object"}}
    check_refused(serve(), COMPLETE, {"prompt": "Hello", **form}, "response_format")


def test_a_model_without_a_template_and_one_that_refuses(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = serve()
    tokenizer = run.engine.loaded.tokenizer
    for template, reason in [
        (None, "no chat template"),
        ("{{ raise_exception('no') }}", "refuses"),
    ]:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        status, answer, _ = run.post(CHAT, {"messages": USER, "max_tokens": 2})
        assert status == 400 and reason in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"1", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000,
     b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}", b'{"prompt": "x\n"}'],
    ids=range(11),
)  # fmt: skip
def test_what_is_not_a_json_object_is_refused(body: bytes, serve: Serve) -> None:
    check_refused(serve(), COMPLETE, body, None)


def test_other_models_paths_and_methods(serve: Serve) -> None:
    run = serve(served_model_name="mine")
    status, answer, _ = run.post(COMPLETE, {"model": MODEL, "prompt": "x"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert run.get("/v1/models")[1]["data"][0]["id"] == "mine"
    assert run.get("/v1/models/mine")[1]["id"] == "mine"
    assert run.get("/v1/models/no/other")[0] == 404
    assert run.post(COMPLETE, {"model": "mine", "prompt": "x", "max_tokens": 1})[0] == 200
    for status, (path, method) in [(404, ("/v1/nothing", "GET")), (405, (COMPLETE, "GET"))]:
        found, answer, _ = run.call(method, path, None, {})
        assert found == status and answer["error"]["message"]


def test_values_that_change_nothing_are_accepted(serve: Serve) -> None:
    run = serve()
    body = {
        "prompt": "x", "max_tokens": 2, "best_of": 1, "n": 1, "suffix": None, "tools": [],
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {}, "min_tokens": 0, "user": "me", "seed": None, "stop": None,
        "temperature": None, "echo": None, "logprobs": None, "stream_options": None,
        "audio": None, "anything": None, "use_beam_search": False, "length_penalty": 1.0,
    }  # fmt: skip
    assert run.post(COMPLETE, body)[0] == 200
    plain = {"messages": USER, "max_tokens": 2, "temperature": 0}
    status, expected, _ = run.post(CHAT, plain)
    same: list[dict[str, Any]] = [
        {"messages": [{**USER[0], "refusal": None, "type": "text"}]},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}]},
        {"parallel_tool_calls": True, "store": True, "metadata": {"a": "b"}, "verbosity": "low"},
        {"prompt_cache_key": "x", "safety_identifier": "y", "reasoning_effort": "low"},
        {"service_tier": "flex", "request_id": "r", "add_generation_prompt": True},
        {"top_logprobs": 0, "chat_template_kwargs": {"enable_thinking": False}},
    ]  # fmt: skip
    for fields in same:
        status, answer, _ = run.post(CHAT, {**plain, **fields})
        assert status == 200, (fields, answer)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    turns = [*USER, {"role": "assistant", "content": None, "reasoning_content": "so"}, *USER]
    assert run.post(CHAT, {**plain, "messages": turns})[0] == 200


def test_variables_reach_the_chat_template(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the call, and the other keys of a message. Also where they are nested deeply."""
    run = serve()
    monkeypatch.setattr(
        run.engine.loaded.tokenizer, "chat_template", "{{ messages[0].mood }}{{ shout }}"
    )
    nested: Any = "!"
    for _ in range(300):
        nested = [nested]
    body = {"messages": [{**USER[0], "mood": "ab"}], "max_tokens": 1}
    status, answer, _ = run.post(CHAT, {**body, "chat_template_kwargs": {"shout": "cde"}})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 5
    status, answer, _ = run.post(CHAT, {**body, "chat_template_kwargs": {"other": nested}})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 2


def test_the_usage_so_far_is_in_every_chunk(serve: Serve) -> None:
    run = serve()
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = call(max_tokens=5, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in run.events(COMPLETE, body)[:-1]]
    assert counts[-1] == 5 and counts == sorted(counts) and set(counts[:-1]) >= {5}


def test_a_body_that_is_too_large(serve: Serve) -> None:
    """10 MB get status 413, with a length and in chunks; the client can read the answer."""
    run = serve(max_body_bytes=100_000)
    large = b" " * 10_000_000
    status, answer, _ = run.post(COMPLETE, large)
    assert status == 413 and "100000" in answer["error"]["message"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (50_000, large[:50_000])
    with run.send(head + chunk * 3) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    with run.send(head.replace(b"Transfer-Encoding: chunked", b"Content-Length: 9999999")) as other:
        assert other.recv(100).startswith(b"HTTP/1.1 413 ")  # before a byte of the body
    assert run.post(COMPLETE, {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_prompt_that_is_too_long_for_the_server(serve: Serve) -> None:
    run = serve(max_prompt_tokens=10)
    assert run.post(COMPLETE, {"prompt": "x" * 10, "max_tokens": 1})[0] == 200
    status, answer, _ = run.post(COMPLETE, {"prompt": "x" * 11})
    assert status == 400 and "max_prompt_tokens=10" in answer["error"]["message"]


def test_the_api_key(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    run = serve(api_key="secret")
    body = {"prompt": "x", "max_tokens": 1}
    keys = (None, "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Bearer \xe9",
            "Basic secret", "Bearersecret")  # fmt: skip
    for key in keys:
        headers = {} if key is None else {"Authorization": key}
        status, answer, found = run.post(COMPLETE, body, headers)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert "secret" not in answer["error"]["message"]
        assert found["www-authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert run.post(COMPLETE, body, {"Authorization": f"{scheme} secret"})[0] == 200
    assert run.get("/metrics")[0] == 401 and run.get("/health")[0] == 200
    assert [card.id for card in run.client(api_key="secret").models.list()] == [MODEL]
