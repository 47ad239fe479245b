"""vision.2: which images have their embeddings on the device, and which requests hold them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common import EngineConfig, Request
from common.hf.image_processor import ProcessedImage
from milestones.electives.vision.encoder_cache import EncoderCache
from milestones.electives.vision.engine import EngineCore
from milestones.electives.vision.images import ImagePart
from milestones.electives.vision.scheduler import Scheduler
from milestones.lab.instruments.plain_runner import PlainRunner
from tests.exercises.by_hand import make_request

PAD = 9
NO_PIXELS: Any = None
DOG, MAP, CAT = (ProcessedImage(n, 1, size, NO_PIXELS) for n, size in ((1, 4), (2, 6), (3, 2)))
NAMES = {1: "dog", 2: "map", 3: "cat"}


class Places:
    """The images of a prompt. It does not need the solution of vision.1."""

    def __init__(self, spans: Sequence[tuple[int, ProcessedImage]]) -> None:
        self.spans = [
            SimpleNamespace(start=start, end=start + image.num_tokens, image=image)
            for start, image in spans
        ]

    def parts(self, start: int, end: int) -> list[ImagePart]:
        found = []
        for span in self.spans:
            tokens = [token for token in range(span.start, span.end) if start <= token < end]
            if tokens:
                rows = tokens[0] - span.start, tokens[-1] + 1 - span.start
                found.append(ImagePart(tokens[0] - start, span.image, *rows))
        return found


def request_with(name: str, *pieces: int | ProcessedImage, computed: int = 0) -> Request:
    token_ids: list[int] = []
    spans = []
    for piece in pieces:
        if isinstance(piece, ProcessedImage):
            spans.append((len(token_ids), piece))
        token_ids += [piece] if isinstance(piece, int) else [PAD] * piece.num_tokens
    request = make_request(name, token_ids, computed=computed, max_tokens=3)
    request.images = Places(spans)
    return request


A, B = request_with("A", 1, DOG, MAP), request_with("B", 1, CAT)


def cached(cache: EncoderCache) -> str:
    """Return the names of the cached images, the least recently used one first."""
    assert [entry.image.digest for entry in cache.entries.values()] == [*cache.entries]
    assert cache.num_tokens == sum(e.image.num_tokens for e in cache.entries.values()), (
        "I3: num_tokens must count the tokens of all cached images"
    )
    return " ".join(NAMES[digest] for digest in cache.entries)


def holders(cache: EncoderCache, image: ProcessedImage) -> str:
    return " ".join(sorted(request.request_id for request in cache.entries[image.digest].holders))


def encodes(cache: EncoderCache) -> str:
    return " ".join(NAMES[image.digest] for image in cache.encodes)


def freed(cache: EncoderCache) -> str:
    return " ".join(NAMES[digest] for digest in cache.freed)


def filled(*images: ProcessedImage, size: int = 12) -> EncoderCache:
    """Return a cache with these images, already encoded, which no request holds."""
    cache = EncoderCache(size)
    for image in images:
        assert cache.hold(A, image), "there is room"
        cache.entries[image.digest].holders.clear()
    cache.take_changes()
    return cache


def test_an_image_is_encoded_once_for_two_requests() -> None:
    cache = EncoderCache(12)
    assert cache.hold(A, DOG), "an empty cache has room"
    assert cache.hold(B, DOG), "a cached image needs no room"
    assert encodes(cache) == "dog", "the second request finds the image"
    assert holders(cache, DOG) == "A B", "I3: both requests hold it"
    assert cached(cache) == "dog", "there is one entry"


def test_a_cached_image_is_not_encoded_again() -> None:
    cache = filled(DOG)
    assert cache.hold(A, DOG), "the image is there"
    assert encodes(cache) == "", "its embeddings are still on the device"
    assert holders(cache, DOG) == "A", "it has a holder again"


def test_a_held_image_is_never_evicted() -> None:
    cache = EncoderCache(8)
    cache.hold(A, DOG)
    assert not cache.hold(B, MAP), "4 + 6 tokens are more than 8, and A holds the dog"
    assert cached(cache) == "dog", "I3: the request needs the embeddings of the dog"
    assert (encodes(cache), freed(cache)) == ("dog", ""), "nothing else has changed"


def test_the_least_recently_used_image_is_evicted() -> None:
    cache = filled(DOG, MAP)
    cache.hold(A, DOG)
    cache.release(A)
    assert cached(cache) == "map dog", "a use makes an image the most recently used one"
    assert cache.hold(B, CAT), "2 tokens are free"
    assert cached(cache) == "map dog cat", "all three fit"
    assert cache.hold(A, ProcessedImage(4, 1, 1, NO_PIXELS)), "the map can go"
    assert freed(cache) == "map", "the map was used longest ago"


def test_no_more_is_evicted_than_needed() -> None:
    cache = filled(CAT, DOG, MAP)
    assert cache.make_room(2), "without the cat, 2 tokens are free"
    assert (freed(cache), cached(cache)) == ("cat", "dog map"), "dog and map can stay"
    assert cache.make_room(2), "there is room already"
    assert freed(cache) == "cat", "nothing else must go"


def test_nothing_is_evicted_in_vain() -> None:
    """Without the dog, there would still be too little room."""
    cache = filled(DOG, MAP)
    cache.hold(B, MAP)
    assert not cache.make_room(7), "6 of 12 tokens are held"
    assert (freed(cache), cached(cache)) == ("", "dog map"), "the dog stays"
    assert cache.make_room(6), "without the dog, 6 tokens are free"


def test_an_image_is_held_until_its_last_token_is_computed() -> None:
    cache = EncoderCache(12)
    request = request_with("C", 1, DOG, 2, MAP, computed=3)
    for image in (DOG, MAP):
        cache.hold(request, image)
    cache.release_computed(request)
    assert holders(cache, DOG) == "C", "I1: two rows of its embeddings are still needed"
    request.num_computed_tokens = 5
    cache.release_computed(request)
    assert holders(cache, DOG) == "", "I5: the keys and values of all its tokens are computed"
    assert "dog" in cached(cache).split(), "its embeddings stay until others need the room"


def test_an_image_that_is_not_begun_is_not_held() -> None:
    """A step that was undone may have held it. The request holds it again when it begins it."""
    cache = EncoderCache(12)
    request = request_with("C", 1, DOG, 2, MAP, computed=3)
    for image in (DOG, MAP):
        cache.hold(request, image)
    cache.release_computed(request)
    assert holders(cache, MAP) == "", "I5: others may need its room before"


def test_an_image_that_comes_twice_in_a_prompt() -> None:
    cache = EncoderCache(12)
    request = request_with("C", DOG, DOG, computed=6)
    cache.hold(request, DOG)
    cache.release_computed(request)
    assert holders(cache, DOG) == "C", "I1: its second copy is half computed"


def scheduler_with(size: int) -> Scheduler:
    config = EngineConfig(
        max_model_len=64, max_num_seqs=4, page_size=4, max_num_batched_tokens=16,
        encoder_cache_size=size,
    )  # fmt: skip
    return Scheduler(config, 40)


def test_a_chunk_holds_the_images_that_it_reads() -> None:
    scheduler = scheduler_with(12)
    request = request_with("C", 1, DOG, 2, MAP)
    assert scheduler.num_tokens_with_images(request, 4) == 4, "there is room for the dog"
    assert cached(scheduler.encoder_cache) == "dog", "the chunk ends before the map"
    request.num_computed_tokens = 4
    assert scheduler.num_tokens_with_images(request, 4) == 4, "there is room for the map, too"
    assert cached(scheduler.encoder_cache) == "dog map", "the chunk reads both images"
    assert holders(scheduler.encoder_cache, MAP) == "C", "the request holds what it reads"


def test_a_chunk_ends_before_an_image_without_room() -> None:
    scheduler = scheduler_with(7)
    scheduler.encoder_cache.hold(A, MAP)
    request = request_with("C", 1, 2, 3, DOG, 4)
    assert scheduler.num_tokens_with_images(request, 8) == 3, "three tokens of text come before it"
    assert holders(scheduler.encoder_cache, MAP) == "A", "the other request keeps its image"
    request.num_computed_tokens = 3
    assert scheduler.num_tokens_with_images(request, 5) == 0, "the next token needs the image"
    scheduler.encoder_cache.release(A)
    assert scheduler.num_tokens_with_images(request, 5) == 5, "I5: now there is room"


def test_a_chunk_of_text_needs_no_image() -> None:
    scheduler = scheduler_with(6)
    scheduler.encoder_cache.hold(A, MAP)
    request = request_with("C", DOG, 1, 2, 3, computed=4)
    assert scheduler.num_tokens_with_images(request, 3) == 3, "its image is computed already"


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_requests_with_several_images_finish(budget: int) -> None:
    """I5: there is room for one image at a time. No request waits for ever."""
    runner: Any = PlainRunner(num_pages=60)
    config = EngineConfig(
        max_model_len=64, max_num_seqs=3, page_size=4, max_num_batched_tokens=budget,
        encoder_cache_size=6,
    )  # fmt: skip
    core = EngineCore(config, runner)
    for number in range(5):
        request = request_with(f"{number}", number, DOG, MAP, DOG, number, CAT)
        core.add_request(request)
    for _ in range(200 if budget == 1 else 100):
        core.step()
        core.check_invariants()
    left = [*core.scheduler.waiting, *core.scheduler.running]
    assert not left, f"I5: {left} have not finished"
    assert not any(e.holders for e in core.scheduler.encoder_cache.entries.values()), (
        "I3: a request that has ended holds an image"
    )
