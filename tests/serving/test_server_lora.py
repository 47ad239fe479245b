"""Adapters on the server: `model` names one, `/v1/models` lists them, other engines refuse them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import EngineFactory
from tests.electives.test_lora_answers import written
from tests.helpers.oracle import drain, greedy
from tests.helpers.serving import MODEL, Serve, serve_fixture  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.since("lora"), pytest.mark.extra("serve")]

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def call(model: str | None, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello", "max_tokens": 6, "temperature": 0, **fields}


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
        status, answer, _ = server.post(COMPLETE, call(name))
        assert (status, answer["model"]) == (200, name)
        assert answer["choices"][0]["text"] == text, name
        events = server.events(COMPLETE, call(name))[:-1]
        assert "".join(e["choices"][0]["text"] for e in events) == text
        assert {event["model"] for event in events} == {name}
    assert len({*texts.values()}) == 3
    chat = {"model": "A", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "n": 2}
    status, answer, _ = server.post(CHAT, chat)
    assert (status, answer["model"], len(answer["choices"])) == (200, "A", 2)
    cards = server.get("/v1/models")[1]["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        (MODEL, None), ("A", MODEL), ("B", MODEL),
    ]  # fmt: skip
    assert server.get("/v1/models/B")[1] == cards[2]
    status, answer, _ = server.post(COMPLETE, call("C"))
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "'A', 'B'" in answer["error"]["message"]


Damage = Callable[[str], str]


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (lambda folder: "A", "lora_modules must be name=folder"),
        (lambda folder: f"={folder}", "lora_modules must be name=folder"),
        (lambda folder: f"A={folder},A={folder}", "each name once"),
        (lambda folder: f"{MODEL}={folder}", "the name of the model itself"),
        (lambda folder: f"A={folder}/none", "lora_modules: A: lora_path: cannot read"),
    ],
)  # fmt: skip
def test_bad_modules_are_refused_at_the_start(
    make_engine: EngineFactory, tmp_path: Path, modules: Damage, said: str
) -> None:
    from milestones.serving.server.app import create_app
    from milestones.serving.server.settings import ServerSettings

    settings = ServerSettings(lora_modules=modules(written(tmp_path, "A").lora_path))
    with pytest.raises(ValueError, match=said):
        create_app(make_engine(), settings)


@pytest.mark.since("m1_single")
@pytest.mark.before("lora")
def test_an_engine_without_adapters_refuses_modules(make_engine: EngineFactory) -> None:
    from milestones.serving.server.app import create_app
    from milestones.serving.server.settings import ServerSettings

    with pytest.raises(ValueError, match="this engine has no adapters; the elective lora has them"):
        create_app(make_engine(), ServerSettings(lora_modules="A=folder"))
