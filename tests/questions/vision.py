"""The questions of vision: random prompts with images, and random uses of the encoder cache."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from common import Request
from common.hf.image_processor import ProcessedImage
from milestones.electives.vision.encoder_cache import EncoderCache
from tests.exercises.test_vision_1 import image, keys, parts, with_images
from tests.exercises.test_vision_2 import request_with, scheduler_with

Asked = Iterator[tuple[str, str, Any]]


def tokens(chance: Random) -> Asked:
    """Ask for the positions, the parts and the keys of random prompts."""
    for _ in range(8):
        pieces: list[int | ProcessedImage] = []
        said = []
        for _ in range(chance.randint(1, 5)):
            if chance.random() < 0.5:
                rows, columns = chance.randint(1, 4), chance.randint(1, 4)
                pieces.append(image(chance.choice([3, 2**90, 2**90 + 2**20]), rows, columns))
                said.append(f"{rows} x {columns}")
            else:
                pieces += [1] * (count := chance.randint(1, 4))
                said.append(f"{count} of text")
        about = f"a prompt: {', '.join(said)}"
        request = with_images(*pieces)
        yield "the keys of the tokens", about, shown(keys(request))
        if request.images is None:
            continue
        size = request.num_tokens
        yield "the positions", about, [list(axis) for axis in request.images.positions(0, size + 2)]
        start = chance.randrange(size)
        end = chance.randint(start + 1, size)
        yield "the parts of a chunk", f"{about}; {start} to {end}", parts(request, start, end)


def shown(found: list[int]) -> list[tuple[bool, int]]:
    """Return which keys are those of text, and which keys are equal to an earlier one."""
    return [(key < 2**18, found.index(key)) for key in found]


def uses(chance: Random) -> Asked:
    """Let requests hold, compute and release images in any order."""
    images = [image(number, 1, chance.randint(1, 6)) for number in range(1, 6)]
    size = chance.randint(6, 12)
    cache = EncoderCache(size)
    requests = [
        request_with(f"r{n}", 1, *(chance.choice(images) for _ in range(3))) for n in range(4)
    ]
    about = f"{size} tokens; images of {[i.num_tokens for i in images]}"
    for _ in range(30):
        request = chance.choice(requests)
        if chance.random() < 0.6:
            wanted = chance.choice(images)
            about += f", {request.request_id} wants {wanted.digest}"
            yield "is there room", shortened(about), cache.hold(request, wanted)
        else:
            request.num_computed_tokens = chance.randint(0, request.num_tokens)
            about += f", {request.request_id} has {request.num_computed_tokens}"
            cache.release_computed(request)
        if chance.random() < 0.3:
            cache.take_changes()
            about += ", a step"
        yield "the cache", shortened(about), state_of(cache)
    yield from chunks(chance)


def chunks(chance: Random) -> Asked:
    """Ask how many tokens of a request can be computed beside another one that holds an image."""
    for _ in range(4):
        held, wanted = (image(n, 1, chance.randint(1, 5)) for n in (1, 2))
        scheduler = scheduler_with(size := chance.randint(5, 9))
        scheduler.encoder_cache.hold(request_with("A", held), held)
        before = chance.randint(0, 3)
        request = request_with("B", *[1] * before, wanted, 2, held, 3)
        request.num_computed_tokens = chance.randint(0, before)
        most = chance.randint(1, request.num_uncomputed_tokens)
        about = f"room {size}, {held.num_tokens} held; text {before}, {wanted.num_tokens}, {most}"
        found = scheduler.num_tokens_with_images(request, most)
        yield "the tokens of a chunk", about, [found, state_of(scheduler.encoder_cache)]


def state_of(cache: EncoderCache) -> list[Any]:
    """Return the entries with their holders, and the changes for the next step."""
    entries = [(e.image.digest, sorted(names_of(e.holders))) for e in cache.entries.values()]
    return [entries, cache.num_tokens, cache.freed, [i.digest for i in cache.encodes]]


def names_of(requests: set[Request]) -> list[str]:
    return [request.request_id for request in requests]


def shortened(about: str) -> str:
    """Return the end of a long story: an exam must not say too much."""
    return about if len(about) < 400 else f"... {about[-400:]}"


QUESTIONS = {"vision.1": (tokens, 30), "vision.2": (uses, 30)}
