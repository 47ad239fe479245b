"""vision: the tokens of Hugging Face's `generate`, with images, whatever the schedule does."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from common import EngineConfig, LLMEngine, LoadedModel, TokensPrompt, UnsupportedModelError
from common.tracing.forced_retractions import force_retractions
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.random_images import IMAGE_TOKEN, MERGE, Piece, image_of, prompt_of
from tests.conftest import EngineFactory, plain_model
from tests.helpers.oracle import Reference, assert_same_tokens, drain, greedy, reference_of

pytestmark = [pytest.mark.since("vision")]

MODELS = ("tiny-qwen2_vl", "tiny-qwen2_5_vl")
TEXT: list[Piece] = [72, 105, 32]
PROMPTS: list[list[Piece]] = [
    [*TEXT, (1, 3, 4), 63],
    [*TEXT, (2, 3, 4), 63],
    [(1, 3, 4), 260],
    [*TEXT, (1, 3, 4), 260, 259, (2, 1, 5), 260, 259, (3, 4, 2), 10],
    [*TEXT, (4, 6, 6), *TEXT],
    [*TEXT, *TEXT],
    [*TEXT, 259, (1, 3, 4), 260, 259, (1, 3, 4), 260, 63],
]


def given_of(prompt: TokensPrompt) -> dict[str, Any]:
    """Return what Hugging Face's model gets of the images of a prompt."""
    if prompt.images is None:
        return {}
    images = [span.image for span in prompt.images.spans]
    sizes = [[1, image.rows * MERGE, image.columns * MERGE] for image in images]
    return {
        "pixel_values": torch.cat([torch.from_numpy(image.pixel_values) for image in images]),
        "image_grid_thw": torch.tensor(sizes),
        "mm_token_type_ids": (torch.tensor([prompt.prompt_token_ids]) == IMAGE_TOKEN).int(),
    }


@functools.cache
def reference(model: str, pieces: tuple[Piece, ...], max_tokens: int) -> Reference:
    """Return what Hugging Face generates. All images are encoded in one call there."""
    prompt = prompt_of(pieces)
    input_ids = torch.tensor([prompt.prompt_token_ids])
    given, hf = given_of(prompt), plain_model(model).model
    out = hf.generate(  # type: ignore[operator]
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False,
        max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **given,
    )  # fmt: skip
    logits = torch.stack([step[0] for step in out.logits])
    return reference_of(out.sequences[0, input_ids.shape[1] :].tolist(), logits)


def images_of(prompts: Iterable[list[Piece]]) -> set[Piece]:
    """Return the distinct images of prompts."""
    return {piece for pieces in prompts for piece in pieces if not isinstance(piece, int)}


def generate(engine: LLMEngine, prompts: list[list[Piece]], max_tokens: int) -> list[list[int]]:
    params = greedy(max_tokens, ignore_eos=True)
    outputs = engine.generate([prompt_of(pieces) for pieces in prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_tokens_are_those_of_hugging_face(
    make_engine: EngineFactory, model: str, chunk: int
) -> None:
    """I1: a chunk may begin and end inside an image."""
    engine = make_engine(model, max_num_batched_tokens=chunk, page_size=4, max_num_seqs=3)
    for pieces, found in zip(PROMPTS, generate(engine, PROMPTS, 12), strict=True):
        assert_same_tokens(reference(model, tuple(pieces), 12), found)
    assert engine.stats().num_encoded_images == len(images_of(PROMPTS)) == 5
    assert_idle(engine)


@pytest.mark.parametrize("model", MODELS)
def test_the_text_after_an_image_at_the_end_of_the_prompt(
    make_engine: EngineFactory, model: str
) -> None:
    """I1: the first output token has the largest position of the image plus 1, on all axes.

    The reference computes all tokens anew in each step. `generate` adds 1 to the three positions of
    the last token, which gives another answer where this token is one of an image.
    """
    pieces: list[Piece] = [*TEXT, (1, 3, 4)]
    prompt, hf = prompt_of(pieces), plain_model(model).model
    given = given_of(prompt)
    kinds, token_ids = given.pop("mm_token_type_ids")[0].tolist(), list(prompt.prompt_token_ids)
    rows = []
    for _ in range(8):
        more = [0] * (len(token_ids) - len(kinds))
        types = torch.tensor([[*kinds, *more]])
        logits = hf(torch.tensor([token_ids]), mm_token_type_ids=types, use_cache=False, **given)
        rows.append(logits.logits[0, -1].detach())
        token_ids.append(int(rows[-1].argmax()))
    expected = reference_of(token_ids[len(kinds) :], torch.stack(rows))
    for chunk in (1, 64):
        engine = make_engine(model, page_size=4, max_num_batched_tokens=chunk)
        assert_same_tokens(expected, generate(engine, [pieces], 8)[0])


@pytest.mark.parametrize("model", MODELS)
def test_another_image_gives_other_tokens(model: str) -> None:
    """Without this, an engine that ignores its images would pass all other tests."""
    first, second = (reference(model, (*TEXT, (n, 3, 4), 63), 12).token_ids for n in (1, 2))
    third = reference(model, (*TEXT, (1, 4, 3), 63), 12).token_ids  # other positions, too
    assert len({tuple(tokens) for tokens in (first, second, third)}) == 3


def test_neighbours_change_nothing(make_engine: EngineFactory) -> None:
    """I2: the embeddings of an image have the same bits in every batch."""
    alone: Any = make_engine(MODELS[0], page_size=4)
    beside: Any = make_engine(MODELS[0], page_size=4)
    (expected,) = generate(alone, PROMPTS[:1], 12)
    assert generate(beside, [*PROMPTS[1:5], PROMPTS[0]], 12)[-1] == expected
    digest = image_of(1, 3, 4).digest
    one, other = (e.core.runner.encoder.embeddings[digest] for e in (alone, beside))
    assert torch.equal(one, other)


def test_an_output_token_with_the_id_of_a_placeholder_is_text(make_engine: EngineFactory) -> None:
    """I1: only the prompt's own places have images, also after a retraction."""
    engine = make_engine(MODELS[0], page_size=4)
    params = greedy(6, ignore_eos=True, logit_bias={IMAGE_TOKEN: 100.0})
    name = engine.add_request(prompt_of(PROMPTS[0]), params)
    for _ in range(4):
        engine.step()
    engine.core.send_back()
    assert drain(engine)[name][-1].outputs[0].token_ids == [IMAGE_TOKEN] * 6


def test_children_share_the_images_of_their_prompt(make_engine: EngineFactory) -> None:
    engine = make_engine(MODELS[0], page_size=4)
    (output,) = engine.generate([prompt_of(PROMPTS[0])], greedy(5, ignore_eos=True, n=3))
    for completion in output.outputs:
        assert_same_tokens(reference(MODELS[0], tuple(PROMPTS[0]), 5), completion.token_ids)
    assert engine.stats().num_encoded_images == 1


def test_log_probabilities_of_a_prompt_with_an_image(make_engine: EngineFactory) -> None:
    """All tokens are computed, and the hidden states are those of the images."""
    engine = make_engine(MODELS[0], page_size=4)
    params = greedy(1, ignore_eos=True, prompt_logprobs=0)
    for _ in range(2):  # with an empty cache, and with the prompt in it
        (output,) = engine.generate([prompt_of(PROMPTS[0])], params)
        found = output.prompt_logprobs
        assert found is not None and found[0] is None and all(found[1:])


def run(engine: LLMEngine, model: str, count: int, seed: int) -> Counter[str]:
    """Run requests with shared and different images; abort some. Return what happened."""
    chance = random.Random(seed)
    expected: dict[str, Reference] = {}
    pieces_of: dict[str, list[Piece]] = {}
    aborted: set[str] = set()
    finals: dict[str, Any] = {}
    while len(expected) < count or engine.has_unfinished_requests():
        while len(expected) < count and chance.random() < 0.5:
            pieces, most = chance.choice(PROMPTS), chance.choice([1, 4, 12])
            name = engine.add_request(prompt_of(pieces), greedy(most, ignore_eos=True))
            expected[name] = reference(model, tuple(pieces), most)
            pieces_of[name] = pieces
        live = sorted(expected.keys() - finals.keys())
        if live and chance.random() < 0.08 and engine.abort_request(name := chance.choice(live)):
            aborted.add(name)
        finals |= {output.request_id: output for output in engine.step() if output.finished}
    assert finals.keys() == expected.keys()
    needed = images_of(pieces_of[name] for name in expected.keys() - aborted)
    assert len(needed) <= engine.stats().num_encoded_images, "an image was not encoded"
    if engine.config.encoder_cache_size > 100:
        assert engine.stats().num_encoded_images <= 5, "an image was encoded twice"
    for name, output in finals.items():
        (found,) = output.outputs
        if name not in aborted:
            assert_same_tokens(expected[name], found.token_ids)
    stats = engine.stats()
    return Counter(
        aborted=len(aborted), encoded=stats.num_encoded_images,
        cached=stats.cached_prompt_tokens, retractions=stats.num_retractions,
    )  # fmt: skip


@pytest.mark.streams
def test_two_hundred_requests_with_images(make_engine: EngineFactory) -> None:
    """Chunks of 1 to 64 tokens, retractions and aborts: each image is encoded once."""
    counts = Counter[str]()
    for seed, chunk in enumerate([1, 5, 16, 33, 64]):
        engine = make_engine(
            MODELS[seed % 2], max_num_batched_tokens=chunk, page_size=4, num_pages=34,
            max_num_seqs=6, max_model_len=128,
        )  # fmt: skip
        force_retractions(engine.core.scheduler, 9)
        found = run(engine, MODELS[seed % 2], 40, seed)
        assert_idle(engine)
        counts += found
    assert counts["aborted"] > 10 and counts["retractions"] > 20 and counts["cached"] > 1000, counts


def test_a_small_encoder_cache_gives_the_same_tokens(make_engine: EngineFactory) -> None:
    """With room for one image at a time, images are encoded again and again."""
    engine = make_engine(MODELS[0], page_size=4, encoder_cache_size=36, max_num_batched_tokens=16)
    found = run(engine, MODELS[0], 30, 7)
    assert found["encoded"] > 4
    assert_idle(engine)


def test_a_failed_forward_is_tried_again(make_engine: EngineFactory, monkeypatch: Any) -> None:
    """Its images are encoded again, because the scheduler forgot them."""
    engine = make_engine(MODELS[0], page_size=4)
    encoder: Any = engine.core.runner.encoder  # type: ignore[attr-defined]
    encode, calls = encoder.encode, iter([1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])

    def failing(image: Any) -> Any:
        if next(calls, 0):
            raise RuntimeError("the encoder fails")
        return encode(image)

    monkeypatch.setattr(encoder, "encode", failing)
    for pieces, found in zip(PROMPTS[:3], generate(engine, PROMPTS[:3], 5), strict=True):
        assert_same_tokens(reference(MODELS[0], tuple(pieces), 5), found)
    assert_idle(engine)


def test_qwen3_vl_is_refused_by_name() -> None:
    """Its encoder adds features to several layers, which no embedding can carry."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from milestones.electives.vision import LLMEngine as VisionEngine

    tiny = plain_model(MODELS[0])
    text = {
        "vocab_size": 263, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    encoder = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3VLConfig(text_config=text, vision_config=encoder)
    loaded = LoadedModel("qwen3-vl", Qwen3VLForConditionalGeneration(config), tiny.tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"\(qwen3_vl\).*DeepStack"):
        VisionEngine(EngineConfig(model="qwen3-vl", device="cpu", max_model_len=64), loaded)
