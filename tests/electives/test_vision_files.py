"""vision: pictures of users become images, or are refused by name, alone (I4). It needs Pillow."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from common import LLMEngine
from common.hf.image_processor import ImageProcessor
from common.text import pictures
from milestones.lab.instruments.audit import assert_idle
from tests.conftest import EngineFactory, plain_model, shared_model
from tests.helpers.oracle import greedy

pytestmark = [pytest.mark.since("vision"), pytest.mark.extra("vision"), pytest.mark.one_mode]

MODEL = "tiny-qwen2_vl"
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(seed: int = 0, width: int = 40, height: int = 24, mode: str = "RGB") -> Any:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def digest(image: Any) -> int:
    return ImageProcessor(shared_model(MODEL)).process(image).digest


def prompt(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [*images]}}


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture
def engine(make_engine: EngineFactory) -> LLMEngine:
    return make_engine(MODEL, page_size=4)


def test_pictures_give_the_tokens_of_hugging_face(engine: LLMEngine) -> None:
    """I1: from pictures to tokens. A picture is resized to a multiple of a token's patches."""
    images = [picture(0), picture(1, 17, 61), picture(2, 500, 400)]
    text = f"a{MARK}b{MARK}{MARK}?"
    (output,) = engine.generate([prompt(text, *images)], greedy(8, ignore_eos=True))
    found = ImageProcessor(shared_model(MODEL)).of_model.preprocess(images, return_tensors="pt")
    ids = torch.tensor([output.prompt_token_ids])
    hf: Any = plain_model(MODEL).model
    kinds = (ids == hf.config.image_token_id).int()
    assert kinds.sum() == found["image_grid_thw"].prod(dim=1).sum() // 4
    expected = hf.generate(
        ids, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0,
        mm_token_type_ids=kinds, **found,
    )[0, ids.shape[1] :]  # fmt: skip
    assert output.outputs[0].token_ids == expected.tolist()
    assert output.prompt == text, "the prompt is as the user wrote it"


def test_a_picture_has_the_same_digest_in_every_file() -> None:
    image = picture()
    assert digest(pictures.open_data_url(url_of(file_of(image)))) == digest(image)
    assert digest(picture()) == digest(image) != digest(picture(1))


def test_the_size_is_a_part_of_the_digest() -> None:
    """A picture of 30 x 150 pixels and one of 150 x 30 may have the same bytes."""
    from PIL import Image

    data = picture(0, 30, 150).tobytes()
    wide, high = (Image.frombytes("RGB", size, data) for size in [(150, 30), (30, 150)])
    assert wide.tobytes() == high.tobytes() and digest(wide) != digest(high)


def test_the_palette_is_a_part_of_the_digest() -> None:
    first = picture(0, mode="P")
    second = first.copy()
    second.putpalette([255 - value for value in first.getpalette()])
    assert first.tobytes() == second.tobytes() and digest(first) != digest(second)


def test_the_options_of_the_processor_are_a_part_of_the_digest() -> None:
    other = ImageProcessor(shared_model(MODEL))
    other.of_model.size = {"shortest_edge": 256, "longest_edge": 1024}
    assert other.process(picture()).digest != digest(picture())


def test_a_jpeg_is_turned_upright() -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    data = file_of(picture(0, 40, 24), "JPEG", exif=exif)
    assert pictures.open_picture(data).size == (24, 40)


BAD_URLS = [
    ("a web address", "https://example.org/a.png", "data URL.*nothing is fetched"),
    ("a file", "file:///etc/passwd", "data URL"),
    ("no text", 5, "data URL"),
    ("a text file", "data:text/plain;base64,aGk=", "data URL"),
    ("no base64", "data:image/png;base64,***", "not base64"),
    ("not a picture", url_of(b"hello"), "neither PNG nor JPEG"),
    ("nothing", "data:image/png;base64,", "neither PNG nor JPEG"),
]


@pytest.mark.parametrize(
    ("url", "cause"), [row[1:] for row in BAD_URLS], ids=[r[0] for r in BAD_URLS]
)
def test_a_bad_url_is_refused_by_its_cause(url: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=f"image_url: .*{cause}"):
        pictures.open_data_url(url)


def test_a_damaged_file_that_pillow_has_opened_is_refused(engine: LLMEngine) -> None:
    """I4: Pillow reads pixels when they are first needed. The engine is as before."""
    from PIL import Image

    data = file_of(picture(0, 200, 200))
    damaged = Image.open(io.BytesIO(data[: len(data) // 2]))
    with pytest.raises(ValueError, match="an image cannot be read: .*truncated"):
        engine.add_request(prompt(f"a{MARK}b", damaged), greedy(2))
    assert not engine.has_unfinished_requests()


def test_bad_files_are_refused_by_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = file_of(picture())
    with pytest.raises(ValueError, match="image_url: the image cannot be used"):
        pictures.open_picture(whole[:-40])
    with pytest.raises(ValueError, match="neither PNG nor JPEG"):
        pictures.open_picture(file_of(picture(), "GIF"))
    with pytest.raises(ValueError, match="40 x 24 pixels, and all images together"):
        pictures.open_picture(whole, 40 * 24 - 1)
    monkeypatch.setattr(pictures, "MOST_BYTES", len(whole) - 1)
    with pytest.raises(ValueError, match=f"at most {len(whole) - 1} bytes"):
        pictures.open_data_url(url_of(whole))


def test_a_small_file_with_many_pixels_is_not_decoded() -> None:
    """Its size is in the head of the file. Decoded, it would take 300 MB."""
    from PIL import Image

    data = file_of(Image.new("1", (9_000, 9_000)))
    assert len(data) < 20_000
    with pytest.raises(ValueError, match="9000 x 9000 pixels"):
        pictures.open_picture(data)


def test_all_pictures_of_a_conversation_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_PIXELS", 2 * 40 * 24)
    parts = [part(url_of(file_of(picture(n)))) for n in range(3)]
    assert len(pictures.read_content(parts[:2], [])) == 2
    with pytest.raises(ValueError, match="all images together must have at most 1920"):
        pictures.read_content(parts, [])


BAD_PROMPTS: list[tuple[str, Any, str]] = [
    ("too few placeholders", lambda: prompt("a", picture()), "0 placeholders .* and 1 images"),
    ("too many", lambda: prompt(MARK * 2, picture()), "2 placeholders .* and 1 images"),
    ("a typed placeholder", lambda: f"what is {MARK}?", "1 placeholders .* and 0 images"),
    ("no picture", lambda: prompt(MARK, b"png"), "image must be a PIL.Image.Image"),
    ("another field", lambda: {"prompt": MARK, "images": [picture()]}, "no other fields"),
    ("a video", lambda: {"prompt": "a", "multi_modal_data": {"video": []}}, "only 'image'"),
    ("a strip", lambda: prompt(MARK, picture(0, 900, 4)), "at most 200 times as wide"),
    ("16 bits", lambda: prompt(MARK, picture(0).convert("I")), "modes .* got 'I'"),
    ("too long", lambda: prompt("x" * 430 + MARK * 3, *[picture(0, 500, 400)] * 3), "tokens"),
]


@pytest.mark.parametrize(
    ("make", "cause"), [r[1:] for r in BAD_PROMPTS], ids=[r[0] for r in BAD_PROMPTS]
)
def test_a_bad_prompt_is_refused_alone(engine: LLMEngine, make: Any, cause: str) -> None:
    params = greedy(6, ignore_eos=True)
    (alone,) = engine.generate([prompt(MARK, picture())], params)
    name = engine.add_request(prompt(MARK, picture()), params)
    with pytest.raises(ValueError, match=cause):
        engine.add_request(make(), params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
    assert outputs[name].outputs[0].token_ids == alone.outputs[0].token_ids
    assert_idle(engine)


def test_messages_with_parts(engine: LLMEngine) -> None:
    """Pictures and texts come in the order of the parts."""
    first, second = picture(0), picture(1)
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "one"}, part(url_of(file_of(first))),
            {"type": "text", "text": "two"}, {"type": "image_pil", "image_pil": second},
        ],
    }  # fmt: skip
    params = greedy(6, ignore_eos=True)
    (chatted,) = engine.chat([message], params)
    text = f"<|im_start|>user\none{MARK}two{MARK}<|im_end|>\n<|im_start|>assistant\n"
    (given,) = engine.generate([prompt(text, first, second)], params)
    assert chatted.prompt_token_ids == given.prompt_token_ids
    assert chatted.outputs[0].token_ids == given.outputs[0].token_ids
    assert engine.stats().num_encoded_images == 2


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_placeholder_that_a_user_types_gets_no_image(engine: LLMEngine, where: str) -> None:
    parts = [{"type": "text", "text": "<|image_pad|>"}, part(url_of(file_of(picture())))]
    message = {"role": "user", "content": parts if where == "before" else parts[::-1]}
    with pytest.raises(
        ValueError, match="text must not contain '<|image_pad|>'".replace("|", r"\|")
    ):
        engine.chat([message], greedy(2))
    assert_idle(engine)


@pytest.mark.parametrize(
    "content", [[{"type": "video"}], ["a"], [{"type": "text"}], [part("x") | {"image_url": "x"}]]
)
def test_other_parts_are_refused(engine: LLMEngine, content: Any) -> None:
    with pytest.raises(ValueError, match="messages: "):
        engine.chat([{"role": "user", "content": content}], greedy(2))


def test_a_model_without_an_encoder_takes_no_images(make_engine: EngineFactory) -> None:
    engine = make_engine("tiny-llama")
    with pytest.raises(ValueError, match="0 placeholders for images and 1 images"):
        engine.add_request(prompt("a", picture()))
    with pytest.raises(ValueError, match="content must be a string"):
        engine.chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}], greedy(2))
    assert engine.generate({"prompt": "a"}, greedy(1))[0].finished
