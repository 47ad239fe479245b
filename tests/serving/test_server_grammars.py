"""`response_format` and `structured_outputs` on the server: answers follow, bad ones get a 400."""

from __future__ import annotations

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import EngineFactory
from tests.helpers.serving import CHAT, COMPLETE, PATIENCE, Serve, call, chat, hold_steps, read

pytestmark = [
    pytest.mark.since("structured_output"),
    pytest.mark.extra("serve"),
    pytest.mark.extra("grammar"),
]

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}


def form(schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def colored(**fields: Any) -> dict[str, Any]:
    return call(response_format=form(), max_tokens=60, **fields)


def test_answers_follow_their_grammar(serve: Serve) -> None:
    """OpenAI's field and vLLM's, whole and as a stream, with n > 1, and none for text."""
    server = serve()
    status, answer, _ = server.post(
        CHAT, chat(max_tokens=60, response_format=form(), n=2, temperature=1)
    )
    assert status == 200
    for choice in answer["choices"]:
        assert json.loads(choice["message"]["content"])["color"] in ("red", "green")
        assert choice["finish_reason"] == "stop"
    events = server.events(CHAT, chat(max_tokens=60, response_format=form()))
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert json.loads("".join(pieces)).keys() == {"color"} and events[-1] == "[DONE]"
    for grammar, pattern in (
        ({"regex": "[ab]{5}"}, "[ab]{5}"), ({"choice": ["yes", "no"]}, "yes|no"),
    ):  # fmt: skip
        _, answer, _ = server.post(COMPLETE, call(structured_outputs=grammar))
        assert re.fullmatch(pattern, answer["choices"][0]["text"])
    status, answer, _ = server.post(
        COMPLETE, call(response_format={"type": "json_object"}, max_tokens=1)
    )
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    plain = server.post(COMPLETE, call())[1]["choices"][0]["text"]
    same = server.post(COMPLETE, call(response_format={"type": "text"}))[1]["choices"][0]["text"]
    assert plain == same


def test_the_official_client(serve: Serve) -> None:
    client = serve().client()
    answer = client.chat.completions.create(**chat(max_tokens=60, response_format=form()))
    assert json.loads(answer.choices[0].message.content)["color"] in ("red", "green")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": form({"not": {}})}, "response_format"),
    ({"response_format": form({"type": "x"})}, "response_format"),
    ({"response_format": form({"$ref": "#"})}, "response_format"),
    ({"response_format": form("no schema")}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": "a"}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": form()}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs"),
]


def test_bad_grammars_get_a_400_and_the_next_call_works(serve: Serve) -> None:
    """Also with stream=true: never a 200 that fails later."""
    server = serve()
    for fields, name in WRONG:
        for stream in (False, True):
            status, answer, _ = server.post(COMPLETE, call(**fields, stream=stream))
            assert status == 400 and answer["error"]["param"] == name, (fields, answer)
            assert name in answer["error"]["message"]
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    status, _, _ = server.post(COMPLETE, call(structured_outputs={"json": deep}))
    assert status == 400
    assert server.post(COMPLETE, call(structured_outputs={"choice": ["a"]}))[0] == 200


def test_other_calls_run_while_a_grammar_is_compiled(
    make_engine: EngineFactory, serve: Serve
) -> None:
    """A compiler that hangs holds up its own call only, and the call ends by the timeout."""
    engine: Any = make_engine()
    begun, release = hold_compilations(engine)
    server, grammars = serve(engine), engine.core.scheduler.grammars
    with ThreadPoolExecutor(1) as pool:
        slow_call = pool.submit(server.post, COMPLETE, colored())
        assert begun.wait(PATIENCE)
        assert server.post(COMPLETE, call())[0] == 200 and server.get("/health")[0] == 200
        grammars.timeout = 0.0
        status, answer, _ = server.post(COMPLETE, call(structured_outputs={"regex": "x"}))
        assert status == 503 and "0 s" in answer["error"]["message"]
        grammars.timeout = 30.0
        release.set()
        status, answer, _ = slow_call.result(PATIENCE)
    assert status == 200 and json.loads(answer["choices"][0]["text"])["color"]


def hold_compilations(engine: Any) -> tuple[threading.Event, threading.Event]:
    """Let the compiler wait. Return an event that it sets when it begins, and one that ends it."""
    begun, release = threading.Event(), threading.Event()
    compiler = engine.core.scheduler.grammars.compiler
    compile_grammar = compiler.compile

    def held(structured: Any) -> Any:
        begun.set()
        assert release.wait(2 * PATIENCE)  # a test fails earlier
        return compile_grammar(structured)

    compiler.compile = held
    return begun, release


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_during_a_compilation(
    stream: bool, make_engine: EngineFactory, serve: Serve
) -> None:
    """Its place is free at once. When the compiler has ended, nothing is queued for it."""
    engine: Any = make_engine()
    begun, release = hold_compilations(engine)
    server, added, add = serve(engine), list[Any](), engine.add_request

    def count_and_add(*args: Any, **options: Any) -> Any:
        added.append(args)
        return add(*args, **options)

    engine.add_request = count_and_add
    connection = server.open(COMPLETE, colored(stream=stream))
    assert begun.wait(PATIENCE) and server.api.open.count == 1
    connection.close()
    server.wait_until(lambda: server.api.open.count == 0)
    release.set()
    compiler = engine.core.scheduler.grammars.compiler
    server.wait_until(lambda: all(future.done() for future in compiler.cache.values()))
    assert server.post(COMPLETE, call())[0] == 200 and len(added) == 1


@pytest.mark.parametrize("ends_by", ["client", "timeout"])
def test_what_no_call_waits_for_is_not_compiled(
    ends_by: str, make_engine: EngineFactory, serve: Serve
) -> None:
    """Two calls keep the threads busy, and a third one ends while its grammar is queued."""
    engine: Any = make_engine()
    _, release = hold_compilations(engine)
    server, compiler = serve(engine), engine.core.scheduler.grammars.compiler
    running = [server.open(COMPLETE, call(structured_outputs={"regex": r})) for r in ("a", "b")]
    server.wait_until(lambda: sum(future.running() for future in compiler.cache.values()) == 2)
    futures = list(compiler.cache.values())
    if ends_by == "timeout":
        engine.core.scheduler.grammars.timeout = 0.0
        status, answer, headers = server.post(COMPLETE, colored())
        assert status == 503 and "0 s" in answer["error"]["message"]
        assert headers["retry-after"] == "1", "a client may try again"
    else:
        connection = server.open(COMPLETE, colored())
        server.wait_until(lambda: len(compiler.cache) == 3)
        connection.close()
        server.wait_until(lambda: server.api.open.count == 2)
    assert list(compiler.cache.values()) == futures
    release.set()
    for connection in running:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.close()


def test_a_drain_waits_for_a_compilation(make_engine: EngineFactory, serve: Serve) -> None:
    engine: Any = make_engine(max_num_seqs=1)
    begun, release = hold_compilations(engine)
    release_steps = hold_steps(engine)
    server = serve(engine, drain_timeout=PATIENCE)
    streams = [server.open(COMPLETE, call(stream=True)) for _ in range(2)]
    server.wait_until(lambda: len(server.api.engine._boxes) == 2)
    compiling = server.open(COMPLETE, colored(stream=True))
    assert begun.wait(PATIENCE)
    server.server.handle_exit(signal.SIGTERM, None)
    assert server.post(COMPLETE, call())[1]["error"]["code"] == "shutting_down"
    release.set()
    release_steps()
    for connection in (*streams, compiling):
        text = read(connection)
        assert b"data: [DONE]" in text and b"error" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_compilation_at_the_deadline_of_a_drain(
    stream: bool, make_engine: EngineFactory, serve: Serve
) -> None:
    """The call has no event yet: it gets a status, and the reason."""
    engine: Any = make_engine()
    begun, release = hold_compilations(engine)
    server = serve(engine, drain_timeout=0.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, COMPLETE, colored(stream=stream))
        assert begun.wait(PATIENCE)
        server.server.handle_exit(signal.SIGTERM, None)
        status, answer, _ = waiting.result(PATIENCE)
        release.set()
    assert status == 503 and "shut down" in answer["error"]["message"]


def test_a_compiler_that_fails_ends_only_its_request(
    make_engine: EngineFactory, serve: Serve
) -> None:
    """An exception that is no refusal is the server's fault: status 500, and the others go on."""
    engine: Any = make_engine()
    server, compile_grammar = serve(engine), engine.core.scheduler.grammars.compiler.compile

    def failing(structured: Any) -> Any:
        raise RuntimeError("planted")

    engine.core.scheduler.grammars.compiler.compile = failing
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.post, COMPLETE, call(max_tokens=200))
        status, answer, _ = server.post(COMPLETE, colored())
        assert status == 500 and answer["error"]["type"] == "server_error"
        assert neighbour.result()[0] == 200
    engine.core.scheduler.grammars.compiler.compile = compile_grammar
    assert server.get("/health")[0] == 200
    assert server.post(COMPLETE, call(structured_outputs={"choice": ["a"]}))[0] == 200


def test_without_the_library_the_field_is_refused(make_engine: EngineFactory, serve: Serve) -> None:
    engine: Any = make_engine()
    engine.input_processor.no_structured_outputs = "llguidance is not installed"
    status, answer, _ = serve(engine).post(CHAT, chat(max_tokens=60, response_format=form()))
    assert status == 400 and answer["error"]["code"] == "unsupported_parameter"
    assert answer["error"]["param"] == "response_format"
    assert "llguidance is not installed" in answer["error"]["message"]
