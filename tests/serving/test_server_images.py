"""Images in `/v1/chat/completions`, with the elective vision."""

from __future__ import annotations

import base64
import gc
import io
from typing import Any

import numpy as np
import pytest

from tests.conftest import EngineFactory
from tests.helpers.serving import CHAT, Running, Serve

pytestmark = [
    pytest.mark.since("vision"),
    pytest.mark.extra("serve"),
    pytest.mark.extra("vision"),
    pytest.mark.one_mode,
]

MODEL = "tiny-qwen2_vl"


def url_of(seed: int, kind: str = "PNG") -> str:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stream.getvalue()).decode()}"


def body(*urls: Any, text: str = "What?", **fields: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"model": MODEL, "messages": [message], "max_tokens": 6, "temperature": 0, **fields}


@pytest.fixture
def run(make_engine: EngineFactory, serve: Serve) -> Running:
    return serve(make_engine(MODEL, page_size=4))


def answer(run: Running, given: dict[str, Any]) -> str:
    status, found, _ = run.post(CHAT, given)
    assert status == 200, found
    return str(found["choices"][0]["message"]["content"])


def test_an_image_changes_the_answer(run: Running) -> None:
    first, second = answer(run, body(url_of(1))), answer(run, body(url_of(2)))
    assert first != second and answer(run, body(url_of(1))) == first
    assert run.in_engine(lambda engine: engine.stats()).num_encoded_images == 2
    assert answer(run, body(url_of(1, "JPEG"))) and answer(run, body(url_of(1), url_of(2)))


def test_the_images_of_all_calls_have_one_limit(make_engine: EngineFactory, serve: Serve) -> None:
    """Their memory counts until nothing holds them: no request, and no cache of the encoder."""
    engine: Any = make_engine(MODEL, page_size=4, encoder_cache_size=64)
    small = body(url_of(1), max_tokens=1)
    run = serve(engine, max_image_bytes=1)
    status, found, headers = run.post(CHAT, small)
    assert status == 503 and found["error"]["code"] == "too_many_bytes"
    assert headers["retry-after"] == "1"
    memory = run.api.prompts._images
    memory.most = 1 << 30
    assert answer(run, small) is not None
    gc.collect()
    memory.most = memory.num_bytes - sum(memory.freed)  # the encoder cache still has this image
    assert memory.most > 0
    assert run.post(CHAT, body(url_of(2)))[0] == 503
    assert run.post(CHAT, body(text="No image."))[0] == 200
    run.in_engine(lambda _: engine.core.scheduler.encoder_cache.make_room(64))
    gc.collect()
    assert answer(run, body(url_of(2))) is not None


def test_the_official_client_sends_images(run: Running) -> None:
    given = body(url_of(1))
    given["messages"][0]["content"][0]["image_url"]["detail"] = "low"  # it changes nothing here
    whole = run.client().chat.completions.create(**given)
    stream = run.client().chat.completions.create(**given, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content == answer(run, given)
    assert whole.usage.prompt_tokens > 12, "the tokens of the image count"


BAD: list[tuple[str, list[Any], str]] = [
    ("a web address", ["https://example.org/a.png"], "nothing is fetched"),
    ("no base64", ["data:image/png;base64,?"], "not base64"),
    ("not a picture", ["data:image/png;base64,aGVsbG8="], "neither PNG nor JPEG"),
    ("no url", [None], "data URL"),
]


@pytest.mark.parametrize(("urls", "cause"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_image_is_a_400_that_names_the_cause(
    run: Running, urls: list[Any], cause: str
) -> None:
    expected = answer(run, body(url_of(1)))
    status, found, _ = run.post(CHAT, body(*urls))
    assert status == 400 and cause in found["error"]["message"], found
    status, found, _ = run.post(CHAT, body(*urls, stream=True))
    assert status == 400, "what fails before the first token has its own status"
    assert answer(run, body(url_of(1))) == expected, "other requests do not notice"


def test_other_bad_calls(run: Running) -> None:
    truncated = url_of(1)[:-60]
    for given, cause in [
        (body(truncated[: len(truncated) // 4 * 4 + 2]), "image_url"),
        (body(url_of(1), text="<|image_pad|>"), "text must not contain"),
        (body(*[url_of(n) for n in range(40)]), "tokens"),
    ]:
        status, found, _ = run.post(CHAT, given)
        assert status == 400 and cause in found["error"]["message"], found
    video = {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}
    status, found, _ = run.post(CHAT, body() | {"messages": [video]})
    assert status == 400 and "'image_url' are supported" in found["error"]["message"]


def test_the_tokens_of_images_are_counted(run: Running) -> None:
    text = run.post("/tokenize", {"messages": body()["messages"]})[1]["count"]
    image = run.post("/tokenize", {"messages": body(url_of(1))["messages"]})[1]["count"]
    assert image == text + 12 + 2  # 3 x 4 tokens between two marks


def test_an_engine_without_images_refuses_them(make_engine: EngineFactory, serve: Serve) -> None:
    run = serve(make_engine("tiny-llama"))
    status, found, _ = run.post(CHAT, body(url_of(1)) | {"model": "tiny-llama"})
    assert status == 400 and "only parts of type 'text' are supported" in found["error"]["message"]
