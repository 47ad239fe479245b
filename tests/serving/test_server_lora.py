"""Adapters on the server: `model` names one, `/v1/models` lists them, other engines refuse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common import LLMEngine
from milestones.serving.server.settings import ServerSettings
from tests.conftest import EngineFactory
from tests.electives.test_lora_answers import written
from tests.helpers.oracle import drain, greedy
from tests.helpers.serving import CHAT, COMPLETE, MODEL, Serve, call, chat

pytestmark = [pytest.mark.since("lora"), pytest.mark.extra("serve")]


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


@pytest.mark.since("m1_single")
@pytest.mark.before("lora")
def test_an_engine_without_adapters_refuses_modules(make_engine: EngineFactory) -> None:
    said = "this engine has no adapters; the elective lora has them"
    assert said in refusal(make_engine(), "A=folder")
