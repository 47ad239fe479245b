"""vision.1: the positions of the tokens of an image, its rows in a chunk, and its keys."""

from __future__ import annotations

from typing import Any

from common import Request
from common.hf.image_processor import ImageSpan, ProcessedImage
from milestones.electives.vision.images import PromptImages
from milestones.electives.vision.kv_cache import KVCacheManager
from milestones.electives.vision.mrope import mrope_positions
from tests.exercises.by_hand import make_request

PAD = 9  # the token id of all placeholders
NO_PIXELS: Any = None


def image(digest: int, rows: int, columns: int) -> ProcessedImage:
    return ProcessedImage(digest, rows, columns, NO_PIXELS)


def positions(num_tokens: int, *spans: ImageSpan) -> list[tuple[int, int, int]]:
    """Return the positions of each token of a prompt: (time, height, width)."""
    time, height, width = mrope_positions(num_tokens, spans)[0]
    return list(zip(time, height, width, strict=True))


def delta(num_tokens: int, *spans: ImageSpan) -> int:
    return mrope_positions(num_tokens, spans)[1]


def with_images(*pieces: int | ProcessedImage) -> Request:
    """Return a request with the tokens and the images of its prompt."""
    token_ids: list[int] = []
    spans = []
    for piece in pieces:
        if isinstance(piece, ProcessedImage):
            spans.append(ImageSpan(len(token_ids), piece))
        token_ids += [piece] if isinstance(piece, int) else [PAD] * piece.num_tokens
    request = make_request("A", token_ids)
    request.images = PromptImages(len(token_ids), spans) if spans else None
    return request


def keys(request: Request, num_tokens: int | None = None) -> list[int]:
    cache = KVCacheManager(num_rows=2, num_pages=8, page_size=2)
    return cache.cache_key(request, request.num_tokens if num_tokens is None else num_tokens)


def parts(request: Request, start: int, end: int) -> list[tuple[int, int, int, int]]:
    """Return the parts of a chunk: index, digest, first row, row after the last one."""
    return [(p.place, p.image.digest, p.first, p.last) for p in request.images.parts(start, end)]


def test_text_has_the_same_position_on_all_axes() -> None:
    assert positions(4) == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)], "text counts from 0"
    assert delta(4) == 0, "the next token of text has its index as its position"


def test_a_token_of_an_image_has_its_row_and_its_column() -> None:
    found = positions(8, ImageSpan(2, image(1, 2, 3)))
    assert found[2:] == [(2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4)], (
        "I1: the first row comes first, and both are counted from the position of the image"
    )


def test_text_goes_on_after_the_longer_side() -> None:
    for rows, columns in ((2, 3), (3, 2), (1, 3), (3, 1)):
        span = ImageSpan(2, image(1, rows, columns))
        after = positions(2 + rows * columns + 1, span)[-1]
        assert after == (5, 5, 5), f"I1: {rows} rows and {columns} columns end before position 5"


def test_tokens_after_the_prompt_go_on_from_its_largest_position() -> None:
    span = ImageSpan(5, image(1, 4, 4))
    assert positions(24, span)[-1] == (11, 11, 11), "the last of 24 tokens has position 11"
    assert delta(24, span) == -12, "the token with index 24 gets position 12"
    assert 21 + delta(21, span) == 9, "I1: the prompt ends with its image: the next position is 9"


def test_a_prompt_with_two_images() -> None:
    spans = ImageSpan(0, image(1, 1, 2)), ImageSpan(3, image(2, 2, 1))
    found = positions(6, *spans)
    expected = [(0, 0, 0), (0, 0, 1), (2, 2, 2), (3, 3, 3), (3, 4, 3), (5, 5, 5)]
    assert found == expected, "I1: the second image begins after the text behind the first one"
    assert delta(6, *spans) == 0, "six tokens took the positions 0 to 5"


def test_images_may_follow_each_other() -> None:
    spans = ImageSpan(0, image(1, 1, 2)), ImageSpan(2, image(1, 1, 2))
    assert positions(4, *spans) == [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)], "no text between"


def test_a_chunk_may_begin_and_end_inside_an_image() -> None:
    request = with_images(1, 1, image(7, 2, 3), 1)
    assert parts(request, 0, 4) == [(2, 7, 0, 2)], "the image begins at index 2 of this chunk"
    assert parts(request, 4, 6) == [(0, 7, 2, 4)], "I1: the third row of the embeddings comes next"
    assert parts(request, 6, 9) == [(0, 7, 4, 6)], "and then the rest"
    assert parts(request, 0, 9) == [(2, 7, 0, 6)], "the whole prompt has the whole image"


def test_a_chunk_of_text_has_no_parts() -> None:
    request = with_images(1, 1, image(7, 2, 3), 1, 1)
    assert parts(request, 0, 2) == [], "the chunk ends where the image begins"
    assert parts(request, 8, 10) == [], "the chunk begins where the image ends"


def test_a_chunk_with_parts_of_two_images() -> None:
    request = with_images(image(7, 1, 2), 1, image(8, 1, 3))
    assert parts(request, 1, 4) == [(0, 7, 1, 2), (2, 8, 0, 1)], "indices count from the chunk"


def test_text_keeps_its_token_ids_as_keys() -> None:
    assert keys(with_images(4, 5, 6)) == [4, 5, 6], "a prompt without images has m5's keys"
    found = keys(with_images(4, image(2**100, 1, 2), 5))
    assert (found[0], found[3]) == (4, 5), "text before and after an image keeps its ids"


def test_an_image_has_the_same_keys_in_every_prompt() -> None:
    first, second = keys(with_images(4, image(77, 1, 3))), keys(with_images(5, 6, image(77, 1, 3)))
    assert first[1:] == second[2:], "equal images must share pages where all before them is equal"


def test_different_images_share_no_key() -> None:
    """All of their tokens have the id of the placeholder."""
    digests = (3, 4, 2**100, 2**100 + 1, 2**100 + 2**16, 2**40 + 3)
    found = [keys(with_images(image(digest, 2, 2))) for digest in digests]
    everything = {key for row in found for key in row}
    assert len(everything) == 4 * len(digests), "I1: two tokens of images have the same key"
    assert not everything & {*range(2**18)}, "I1: a key of an image is also a token id"


def test_a_shorter_key_is_the_beginning_of_a_longer_one() -> None:
    request = with_images(4, image(77, 2, 2), 5)
    whole = keys(request)
    for num_tokens in range(7):
        assert keys(request, num_tokens) == whole[:num_tokens], f"the first {num_tokens} tokens"
    assert request.token_ids == [4, PAD, PAD, PAD, PAD, 5], "the request keeps its tokens"


def test_requests_share_the_pages_of_equal_images() -> None:
    cache = KVCacheManager(num_rows=2, num_pages=8, page_size=2)
    first = with_images(4, image(77, 2, 2), 5)
    cache.allocate(first)
    cache.allocate_slots(first, 6)
    first.num_computed_tokens = 6
    cache.free(first)
    same, other = with_images(4, image(77, 2, 2), 5), with_images(4, image(78, 2, 2), 5)
    assert cache.find_prefix(same).num_pages == 2, "all pages but that of the last token"
    assert cache.find_prefix(other).num_pages == 0, "I1: another image has other keys and values"
