"""Clients that people use, each in an environment of its own: see `tests/clients`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from milestones.serving.server.settings import HERMES
from tests.clients.environment import is_installed, python_of
from tests.conftest import ROOT, EngineFactory
from tests.helpers.serving import CHAT, COMPLETE, MODEL, Running, Serve, call, chat, long_model

pytestmark = [
    pytest.mark.extra("serve"),
    pytest.mark.thorough("a process with the packages of another project"),
]
with_tools, with_embeddings = pytest.mark.since("structured_output"), pytest.mark.since("embedding")
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def run_client(client: str, *arguments: str) -> Any:
    if not is_installed(client):
        message = f"python -m tests.clients.environment {client} installs it"
        if os.environ.get("LADDER_CLIENTS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    script = ROOT / f"tests/clients/with_{client}.py"
    done = subprocess.run(
        [python_of(client), script, *arguments], capture_output=True, text=True, timeout=240,
        env={**os.environ, **OFFLINE}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(name="run")
def run_fixture(make_engine: EngineFactory, serve: Serve) -> Running:
    engine = make_engine(long_model(), max_model_len=2048, num_pages=600)
    return serve(engine, tool_call_parser="hermes", chat_template=str(ROOT / HERMES))


def text_of(run: Running, content: str = "Hello") -> str:
    """Return the answer of a chat, as the server gives it without a client."""
    message = {"role": "user", "content": content}
    answer = run.post(CHAT, chat() | {"messages": [message]})[1]
    return str(answer["choices"][0]["message"]["content"])


@with_tools
def test_langchain(run: Running) -> None:
    found = run_client("langchain", "chats", run.url, MODEL)
    assert found["chat"] == found["stream"] == text_of(run) and found["usage"] == 16
    assert found["batch"] == [text_of(run), text_of(run, "Bye")]
    (made,) = found["calls"]
    assert made["name"] == "clock" and isinstance(made["args"]["zone"], bool)
    assert [[*args] for args in found["streamed"]] == [["zone"]] and found["last"]


@with_embeddings
def test_langchain_embeddings(make_engine: EngineFactory, serve: Serve) -> None:
    """It sends 1,000 texts in one call, as texts."""
    run = serve(make_engine(num_pages=600))
    found = run_client("langchain", "embeddings", run.url, MODEL)
    answer = run.post("/v1/embeddings", {"input": "text 0"})[1]["data"][0]["embedding"]
    assert found["count"] == 1000
    assert found["first"] == pytest.approx(answer, abs=1e-5)
    assert found["query"] == pytest.approx(answer, abs=1e-5)


@with_tools
def test_litellm(run: Running) -> None:
    found = run_client("litellm", run.url, MODEL)
    assert found["chat"] == found["stream"] == text_of(run)
    assert found["call"]["name"] == "clock" and isinstance(found["call"]["args"]["summer"], bool)
    assert found["text"] == run.post(COMPLETE, call())[1]["choices"][0]["text"]


@with_tools
def test_llm(run: Running) -> None:
    found = run_client("llm", run.url, MODEL)
    assert found["chat"].rstrip("\n") == found["stream"].rstrip("\n") == text_of(run).rstrip("\n")


@pytest.mark.since("m5_overlap")
def test_lm_eval(make_engine: EngineFactory, serve: Serve, tmp_path: Path) -> None:
    """Scores, texts and log probabilities are those of Hugging Face's backend."""
    loaded = long_model()
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    theirs = run_client("lm_eval", str(tmp_path))
    run = serve(make_engine(loaded, max_model_len=1024, num_pages=600))
    ours = run_client("lm_eval", str(tmp_path), run.url, MODEL)
    for name in ("acc", "exact_match", "texts", "greedy"):
        assert ours[name] == theirs[name], name
    for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
        assert mine == pytest.approx(other, abs=1e-3)
