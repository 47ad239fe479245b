"""Embeddings and adapters on the server, which some electives have. Others refuse them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common import LLMEngine
from milestones.serving.server.settings import ServerSettings
from tests.conftest import EngineFactory, build_engine, plain_model
from tests.electives.test_lora_answers import written
from tests.helpers.oracle import drain, greedy
from tests.helpers.serving import CHAT, COMPLETE, MODEL, Serve, call, chat

pytestmark = pytest.mark.extra("serve")
with_embeddings, with_adapters = pytest.mark.since("embedding"), pytest.mark.since("lora")

IDS = [*range(3, 20)]


def expected(ids: list[int], dimensions: int | None = None) -> Any:
    """Return the normalized last hidden state of the model of the tests."""
    with torch.inference_mode():
        out = plain_model(MODEL).model(torch.tensor([ids]), output_hidden_states=True)
    vector = out.hidden_states[-1][0, -1][:dimensions]
    return (vector / vector.norm()).numpy()


@with_embeddings
def test_the_official_client_gets_vectors(serve: Serve) -> None:
    """It asks for base64 by itself. Text, texts, token ids, and lists of token ids."""
    running = serve()
    client = running.client()
    tokenizer = running.engine.input_processor.tokenizer
    hello, bye = tokenizer.encode("hello"), tokenizer.encode("good bye")
    inputs = {"hello": [hello], ("hello", "good bye"): [hello, bye]}
    for given, ids in inputs.items():
        text = given if isinstance(given, str) else list(given)
        for asked in (text, ids if len(ids) > 1 else ids[0]):
            for form in ({}, {"encoding_format": "float"}):
                answer = client.embeddings.create(model=MODEL, input=asked, **form)
                assert [item.index for item in answer.data] == [*range(len(ids))]
                for item, tokens in zip(answer.data, ids, strict=True):
                    assert np.abs(np.array(item.embedding) - expected(tokens)).max() < 1e-5
                assert answer.usage.prompt_tokens == answer.usage.total_tokens
                assert answer.usage.prompt_tokens == sum(map(len, ids))
                assert (answer.model, answer.object) == (MODEL, "list")


@with_embeddings
def test_dimensions_and_the_two_formats(serve: Serve) -> None:
    running, body = serve(), {"input": IDS, "dimensions": 10}
    wanted = expected(IDS, 10)
    _, numbers, _ = running.post("/v1/embeddings", body)
    _, packed, _ = running.post("/v1/embeddings", {**body, "encoding_format": "base64"})
    decoded = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - wanted).max() < 1e-5
    assert numbers["data"][0]["embedding"] == decoded.tolist()
    raw = {**body, "pooling_type": "MEAN", "normalize": False}
    status, answer, _ = running.post("/v1/embeddings", raw)
    assert status == 200 and abs(np.linalg.norm(answer["data"][0]["embedding"]) - 1) > 0.1


@with_embeddings
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"), ({"input": [""]}, "input"), ({"input": 5}, "input"),
        ({"input": [[1, "a"]]}, "input"), ({"input": [999]}, "input"),
        ({"input": [1] * 513}, "input"), ({"dimensions": 65}, "dimensions"),
        ({"dimensions": 0}, "dimensions"), ({"dimensions": "8"}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"), ({"pooling_type": "CLS"}, "pooling_type"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"), ({"stream": True}, "stream"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_by_name(serve: Serve, change: Any, param: str) -> None:
    """I4. Nothing is cut off silently, and other calls are answered."""
    running = serve()
    status, answer, _ = running.post("/v1/embeddings", {"input": IDS, **change})
    assert status == 400 and answer["error"]["param"] == param, answer
    assert running.post("/v1/embeddings", {"input": [1] * 512})[0] == 200


@with_embeddings
def test_one_bad_input_refuses_the_whole_call(serve: Serve) -> None:
    running = serve()
    status, answer, _ = running.post("/v1/embeddings", {"input": [IDS, [999]]})
    assert status == 400 and "999" in answer["error"]["message"]
    assert running.is_idle()


@with_embeddings
def test_many_inputs_are_computed_as_places_become_free(
    serve: Serve, make_engine: EngineFactory
) -> None:
    """A call takes a fourth of the places, so that the others stay free for other calls."""
    running = serve(make_engine(num_pages=400), max_open_requests=8)
    inputs = [[3 + i % 50, 4, 5 + i // 50] for i in range(300)]
    places = set[int]()  # that the call holds, whenever it gives the engine an input
    add = running.engine.add_request

    def spy(*args: Any, **more: Any) -> Any:
        places.add(running.api.open.count)
        return add(*args, **more)

    running.engine.add_request = spy  # type: ignore[method-assign]
    status, answer, _ = running.post("/v1/embeddings", {"input": inputs})
    assert status == 200 and [item["index"] for item in answer["data"]] == [*range(300)]
    assert places == {2}, "a fourth of the places"
    for i in (0, 151, 299):
        assert np.abs(np.array(answer["data"][i]["embedding"]) - expected(inputs[i])).max() < 1e-5
    status, answer, _ = running.post("/v1/embeddings", {"input": [[3]] * 2049})
    assert status == 400 and answer["error"]["param"] == "input"


@with_embeddings
def test_texts_and_vectors_are_counted(serve: Serve) -> None:
    """The metrics have no output tokens and no first token for a vector."""
    running = serve()
    running.post("/v1/embeddings", {"input": [IDS, IDS[:4]]})
    running.post("/v1/completions", {"prompt": IDS, "max_tokens": 3, "ignore_eos": True})
    found = running.metrics()
    assert found["vllm:prompt_tokens_total"] == len(IDS) * 2 + 4
    assert found["vllm:generation_tokens_total"] == 3
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:time_to_first_token_seconds_count"] == 1


@with_embeddings
def test_a_server_without_embeddings_names_the_elective(serve: Serve) -> None:
    running = serve(build_engine("m5_overlap"))
    status, answer, _ = running.post("/v1/embeddings", {"input": "hello"})
    assert status == 400 and "elective embedding" in answer["error"]["message"]


@with_adapters
def test_the_model_of_a_request_names_an_adapter(
    serve: Serve, make_engine: EngineFactory, tmp_path: Path
) -> None:
    """Whole, as a stream and as a chat; each answer has the name that was asked for."""
    adapters = {name: written(tmp_path, name) for name in "AB"}
    engine: Any = make_engine()
    texts = {}
    for name in (None, *adapters):
        request = adapters[name] if name else None
        known = engine.add_request("Hello", greedy(6), lora_request=request)
        texts[name or MODEL] = drain(engine)[known][-1].outputs[0].text
    modules = ",".join(f"{name}={request.lora_path}" for name, request in adapters.items())
    server = serve(lora_modules=modules)
    for name, text in texts.items():
        status, answer, _ = server.post(COMPLETE, call(model=name, max_tokens=6))
        assert (status, answer["model"]) == (200, name)
        assert answer["choices"][0]["text"] == text, name
        events = server.events(COMPLETE, call(model=name, max_tokens=6))[:-1]
        assert "".join(e["choices"][0]["text"] for e in events) == text
        assert {event["model"] for event in events} == {name}
    assert len({*texts.values()}) == 3
    status, answer, _ = server.post(CHAT, chat(model="A", max_tokens=3, n=2, temperature=1))
    assert (status, answer["model"], len(answer["choices"])) == (200, "A", 2)
    cards = server.get("/v1/models")[1]["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        (MODEL, None), ("A", MODEL), ("B", MODEL),
    ]  # fmt: skip
    assert server.get("/v1/models/B")[1] == cards[2]
    status, answer, _ = server.post(COMPLETE, call(model="C"))
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "'A', 'B'" in answer["error"]["message"]


def refusal(engine: LLMEngine, modules: str) -> str:
    """Return why a server with these modules does not start."""
    from milestones.serving.server.app import create_app

    with pytest.raises(ValueError, match="lora_modules") as refused:
        create_app(engine, ServerSettings(lora_modules=modules))
    return str(refused.value)


@with_adapters
@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("A", "lora_modules must be name=folder"),
        ("=FOLDER", "lora_modules must be name=folder"),
        ("A=FOLDER,A=FOLDER", "each name once"),
        (f"{MODEL}=FOLDER", "the name of the model itself"),
        ("A=FOLDER/none", "lora_modules: A: lora_path: cannot read"),
    ],
)
def test_bad_modules_are_refused_at_the_start(
    make_engine: EngineFactory, tmp_path: Path, modules: str, said: str
) -> None:
    folder = written(tmp_path, "A").lora_path
    assert said in refusal(make_engine(), modules.replace("FOLDER", folder))


@pytest.mark.before("lora")
def test_an_engine_without_adapters_refuses_modules(make_engine: EngineFactory) -> None:
    said = "this engine has no adapters; the elective lora has them"
    assert said in refusal(make_engine(), "A=folder")
