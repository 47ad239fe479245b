"""vision: random schedules with images on hashes, M-RoPE, the encoder cache, and the tree's keys.

No test here needs Pillow or a model: see `test_vision_answers.py`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from common import TokensPrompt
from common.tracing.forced_retractions import force_retractions
from milestones.chain import load
from milestones.lab.instruments.audit import assert_idle
from milestones.lab.instruments.random_images import Piece, image_of, prompt_of
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import ModuleOf, schedules
from tests.helpers.fake_overlap import HashResult, HashRunner, hash_engine, text_of
from tests.helpers.fake_paged import kv_of, next_token
from tests.helpers.oracle import drain, greedy
from tests.helpers.random_schedule import add_random, random_sizes, run_schedule
from tests.helpers.replaced import plant

pytestmark = [pytest.mark.since("vision"), pytest.mark.streams]

SCHEDULES = schedules(400)
STREAMS = (LateStream, EarlyStream)
PACKAGE = "milestones.electives.vision"
SIZES = ((1, 1), (1, 3), (2, 2), (3, 2), (2, 5))  # rows and columns of images


class ImageRunner(HashRunner):
    """Hashes read a token's row of an image in place of its id, and its three positions.

    The embeddings of an image are there from the step that encodes it to the one that frees it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.embedded: set[int] = set()  # digests
        self.encoded: Counter[int] = Counter()
        self.meanings: dict[int, list[Any]] = {}  # of the tokens of each launch

    def launch(self, batch: Any, table: Any) -> HashResult:
        builder = load("vision", "model_input").InputBuilder
        time, height, width = builder.positions(builder, batch).tolist()
        rows: list[Any] = [None] * batch.num_tokens
        for part in batch.image_parts:
            for row in range(part.first, part.last):
                index = part.place + row - part.first
                assert rows[index] is None, "I1: a token belongs to two images"
                rows[index] = (part.image.digest, row)
        self.newest = [*zip(rows, zip(time, height, width, strict=True), strict=True)]
        self.changes = batch.changes
        return super().launch(batch, table)

    def launch_after_copies(self, work: Any) -> Any:
        newest, changes = getattr(self, "newest", []), getattr(self, "changes", None)
        self.newest, self.changes = [], None

        def with_images() -> None:
            self.now = newest
            for digest in changes.freed if changes else ():
                self.embedded.discard(digest)
            for image in changes.encodes if changes else ():
                self.embedded.add(image.digest)
                self.encoded[image.digest] += 1
                self.encoder.num_encoded += 1
            work()

        return super().launch_after_copies(with_images)

    def _compute(self, parts: list[Any], result: HashResult) -> None:
        meanings = iter(self.now)
        for part in parts:
            kv = tuple(self.memory[self._slot(part, p)] for p in range(part.start))
            for index, token in enumerate(part.tokens, part.start):
                page = part.pages[index // self.page_size]
                assert page not in self.free_pages, "I3: a free page is written"
                row, positions = next(meanings)
                assert row is None or row[0] in self.embedded, "I3: an image is not encoded"
                known = self.futures[-token] if token < 0 else token
                value = kv_of(kv, (known if row is None else row, positions), 0)
                self.memory[self._slot(part, index)] = value
                kv = (*kv, value)
            if part.num_outputs:
                result.tokens.append(next_token(kv))
                self.futures[part.row] = result.tokens[-1]


def expected_output(pieces: list[Piece], max_tokens: int, stops: list[int], stop: str) -> list[int]:
    """Return the answer to a prompt with images, computed from its pieces alone."""
    kv: tuple[int, ...] = ()
    position = 0

    def feed(meaning: Any, *positions: int) -> None:
        nonlocal kv
        kv = (*kv, kv_of(kv, (meaning, positions), 0))

    for piece in pieces:
        if isinstance(piece, int):
            feed(piece, position, position, position)
            position += 1
            continue
        image = image_of(*piece)
        for row in range(image.num_tokens):
            down, right = divmod(row, image.columns)
            feed((image.digest, row), position, position + down, position + right)
        position += max(image.rows, image.columns)
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(token := next_token(kv))
        if token in stops or (stop and stop in text_of(output)):
            break
        feed(token, position, position, position)
        position += 1
    return output


def random_pieces(chance: random.Random, longest: int, most: int) -> list[Piece]:
    """Return a prompt of at most `longest` tokens. Its images have at most `most` tokens."""
    sizes = [size for size in SIZES if size[0] * size[1] <= most]
    stems: list[list[Piece]] = [[], [], [7] * 5, [(0, 2, 2), 7, 7]]
    pieces = list(chance.choice(stems))
    if most < 4:
        pieces = [piece for piece in pieces if isinstance(piece, int)]
    length = sum(1 if isinstance(p, int) else p[1] * p[2] for p in pieces)
    for _ in range(chance.randint(1, 12)):
        piece: Piece = chance.randrange(50)
        if chance.random() < 0.4:
            piece = (chance.randrange(4), *chance.choice(sizes))
        size = 1 if isinstance(piece, int) else piece[1] * piece[2]
        if length + size <= longest:
            pieces.append(piece)
            length += size
    return pieces if 0 < length <= longest else [1]


def fuzz(
    module: Any, seed: int, stream: type[LateStream], counts: Counter[str], may_fail: bool = True
) -> None:
    """Run one random schedule with images, aborts, retractions and failures."""
    chance = random.Random(seed)
    page_size, longest, num_pages = random_sizes(chance)
    size = chance.choice([3, 6, 10, 10, 25])  # of the encoder cache
    engine = hash_engine(
        module, stream(), num_pages, ImageRunner, page_size=page_size,
        max_num_seqs=chance.randint(1, 6), max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
        schedule_policy=chance.choice(["fcfs", "fcfs", "lpm", "random"]), seed=seed,
        encoder_cache_size=size, enable_overlap=chance.random() < 0.9,
    )  # fmt: skip
    runner = engine.core.runner
    rate = chance.choice([0.0, 0.0, 0.1, 0.2]) if may_fail else 0.0
    runner.fails = lambda: chance.random() < rate
    force_retractions(engine.core.scheduler, chance.choice([None, None, None, 2, 7]))

    def add() -> tuple[str, list[int]]:
        pieces = random_pieces(chance, longest, size)

        def answer(_: Any, most: int, stops: list[int], stop: str) -> list[int]:
            return expected_output(pieces, most, stops, stop)

        prompt: Any = Sized(*prompt_of(pieces, image_token=0))
        return add_random(engine, chance, prompt, answer)

    def audit() -> None:
        cache = engine.core.scheduler.encoder_cache
        assert cache.num_tokens <= size, "I3: too many images are cached"

    run_schedule(engine, chance, add, chance.randint(4, 14), before_step=audit, may_fail=rate > 0)
    cache = engine.core.scheduler.encoder_cache
    assert runner.embedded - {*cache.freed} <= cache.entries.keys(), "I3: embeddings leak"
    assert not any(entry.holders for entry in cache.entries.values()), "I3: an image is held"
    counts["encoded"] += runner.encoded.total()
    counts["again"] += runner.encoded.total() - len(runner.encoded)
    counts["cached"] += engine.stats().cached_prompt_tokens
    counts["retractions"] += engine.stats().num_retractions


class Sized(TokensPrompt):
    """A prompt that `add_random` can ask for its length."""

    def __len__(self) -> int:
        return len(self.prompt_token_ids)


@pytest.mark.parametrize("stream", STREAMS)
def test_random_schedules_with_images(module_of: ModuleOf, stream: type[LateStream]) -> None:
    """Schedules are exact to the token, whenever forwards run."""
    counts = Counter[str]()
    first = SCHEDULES // 2 * STREAMS.index(stream)
    for number in range(SCHEDULES // 2):
        fuzz(module_of("engine"), first + number, stream, counts)
    assert counts["encoded"] > 2 * SCHEDULES and counts["again"] > SCHEDULES // 4, counts
    assert counts["cached"] > SCHEDULES and counts["retractions"] > SCHEDULES // 8, counts


def spans_of(*pieces: Piece) -> Any:
    return prompt_of(pieces).images.spans


def test_the_positions_of_a_prompt_with_an_image() -> None:
    """A prompt of 24 tokens ends at position 11, and the next token gets position 12."""
    images = prompt_of([1] * 5 + [(0, 4, 4)] + [2] * 3).images
    time, height, width = images.positions(0, 26)
    assert time == [*range(5), *[5] * 16, 9, 10, 11, 12, 13]
    assert height == [*range(5), *sorted([5, 6, 7, 8] * 4), 9, 10, 11, 12, 13]
    assert width == [*range(5), *[5, 6, 7, 8] * 4, 9, 10, 11, 12, 13]


def test_positions_go_on_after_the_longer_side() -> None:
    mrope = load("vision", "mrope").mrope_positions
    for rows, columns in [(4, 4), (1, 4), (4, 1)]:
        axes, delta = mrope(5 + rows * columns, spans_of(*[1] * 5, (0, rows, columns)))
        assert max(map(max, axes)) + 1 == 5 + rows * columns + delta == 9
    axes, delta = mrope(3, ())
    assert axes == ([0, 1, 2],) * 3 and delta == 0


def test_positions_do_not_depend_on_the_chunk() -> None:
    images = prompt_of([1, (0, 2, 3), 1, (1, 3, 1), (2, 1, 1)]).images
    whole = images.positions(0, 20)
    for size in range(1, 9):
        starts = range(0, 20, size)
        chunks = [images.positions(start, min(20, start + size)) for start in starts]
        joined = tuple([p for chunk in chunks for p in chunk[axis]] for axis in range(3))
        assert joined == whole, size


def test_rows_of_images_in_a_chunk() -> None:
    """An image at the tokens 10 to 73: token 40 gets row 30 of its embeddings."""
    images = prompt_of([1] * 10 + [(0, 8, 8)] + [1] * 6).images
    (part,) = images.parts(40, 56)
    assert (part.place, part.first, part.last) == (0, 30, 46)
    (part,) = images.parts(5, 12)
    assert (part.place, part.first, part.last) == (5, 0, 2)
    assert [*images.parts(0, 10)] == [*images.parts(74, 90)] == []


def test_two_requests_with_two_images_keep_their_order() -> None:
    batch = load("vision", "schedule_batch").ScheduleBatch()
    prompts: list[list[Piece]] = [[1, (0, 1, 2), (1, 2, 2)], [(2, 1, 1), 5, (3, 1, 3)]]
    for pieces in prompts:
        prompt = prompt_of(pieces)
        request: Any = SimpleNamespace(
            token_ids=prompt.prompt_token_ids, num_computed_tokens=0, images=prompt.images
        )
        batch.add(request, len(request.token_ids))
    digests = [image_of(*size).digest for size in [(0, 1, 2), (1, 2, 2), (2, 1, 1), (3, 1, 3)]]
    assert [part.image.digest for part in batch.image_parts] == digests
    assert [part.place for part in batch.image_parts] == [1, 3, 7, 9]


def engine_for(module_of: ModuleOf, **config: Any) -> Any:
    config = {"page_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, **config}
    return hash_engine(module_of("engine"), LateStream(), 60, ImageRunner, **config)


def ask(engine: Any, pieces: list[Piece], max_tokens: int = 4) -> str:
    params = greedy(max_tokens, ignore_eos=True)
    return str(engine.add_request(prompt_of(pieces, image_token=0), params))


def test_an_image_is_encoded_once_for_many_requests(module_of: ModuleOf) -> None:
    engine = engine_for(module_of, max_num_batched_tokens=7, encoder_cache_size=12)
    for tail in range(6):
        ask(engine, [tail, (0, 2, 3), (1, 2, 2), tail])
    drain(engine)
    assert engine.stats().num_encoded_images == 2
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("first", [5, 6, 7])
def test_a_large_image_waits_for_no_younger_ones(
    module_of: ModuleOf, overlap: bool, first: int
) -> None:
    """I5: small images come for ever, and one of them is always in the middle of a chunk."""
    for before in (1, 2, 3):
        engine = engine_for(
            module_of, max_num_batched_tokens=4, encoder_cache_size=10, max_num_seqs=8,
            enable_overlap=overlap,
        )  # fmt: skip
        digests = count(100)
        ask(engine, [(next(digests), 1, first)], 1)
        for _ in range(before):
            ask(engine, [(next(digests), 1, 4)], 1)
            engine.step()
        large = ask(engine, [7, (1, 2, 5), 8], 1)
        for _ in range(60):
            while len(engine.core.scheduler.waiting) < 4:
                ask(engine, [(next(digests), 1, 4)], 1)
            if large in [output.request_id for output in engine.step() if output.finished]:
                break
        else:
            pytest.fail("I5: the large image waits behind younger ones")


def test_a_cached_prefix_needs_no_encoder(module_of: ModuleOf) -> None:
    """The keys and values of the image are in the tree, so its embeddings are not needed."""
    engine = engine_for(module_of, encoder_cache_size=6)
    for number in (0, 1, 0):  # the second image takes the room of the first one
        ask(engine, [(number, 2, 3), 5, 6])
        drain(engine)
    assert engine.stats().num_encoded_images == 2
    assert engine.stats().cached_prompt_tokens == 6


def test_a_hit_that_ends_inside_an_image_encodes_it_again(module_of: ModuleOf) -> None:
    """I1: the rest of the image is computed from the right rows of its embeddings."""
    engine = engine_for(module_of, encoder_cache_size=6, page_size=4)
    pieces: list[Piece] = [1, (0, 2, 3), 5]
    ask(engine, pieces)
    drain(engine)
    ask(engine, [2, (1, 2, 3)])
    drain(engine)
    name = ask(engine, pieces)
    (outputs,) = [found for key, found in drain(engine).items() if key == name]
    assert outputs[-1].outputs[0].token_ids == expected_output(pieces, 4, [], "")
    assert outputs[-1].metrics.num_cached_tokens == 4  # the first three rows
    assert engine.stats().num_encoded_images == 3


@pytest.mark.parametrize("size", [1, 2, 16])
def test_room_for_one_image_is_enough(module_of: ModuleOf, size: int) -> None:
    """I5: a request with several images finishes, and no step is empty for ever."""
    engine = engine_for(module_of, encoder_cache_size=6, max_num_batched_tokens=size)
    names = [ask(engine, [(n, 2, 3), (n + 1, 3, 2), 4, (n, 2, 2)]) for n in range(5)]
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        assert steps < 400, "I5: the requests do not finish"
        engine.step()
    assert len(names) == 5 and engine.stats().num_encoded_images >= 10


def test_a_retracted_request_encodes_again(module_of: ModuleOf) -> None:
    engine = engine_for(module_of, encoder_cache_size=6, max_num_batched_tokens=2, page_size=4)
    ask(engine, [(0, 2, 3), 1])
    engine.step()
    engine.core.send_back()
    cache = engine.core.scheduler.encoder_cache
    assert not any(entry.holders for entry in cache.entries.values())
    ask(engine, [(1, 3, 2), 1])
    drain(engine)
    assert_idle(engine)


def test_an_image_that_can_never_be_cached_is_refused_alone(module_of: ModuleOf) -> None:
    engine = engine_for(module_of, encoder_cache_size=5)
    ask(engine, [(0, 2, 2)])
    with pytest.raises(ValueError, match="6 tokens, more than encoder_cache_size=5"):
        ask(engine, [1, (0, 2, 3)])
    drain(engine)
    assert_idle(engine)


def keys_without_images(_: Any, self: Any, request: Any, num_tokens: int) -> list[int]:
    return list(request.token_ids[:num_tokens])


def keys_of_a_short_digest(_: Any, self: Any, request: Any, num_tokens: int) -> list[int]:
    key = list(request.token_ids[:num_tokens])
    for part in request.images.parts(0, len(key)) if request.images else ():
        for row in range(part.first, part.last):
            index = part.place + row - part.first
            key[index] += (part.image.digest % 1000 * 2**32 + row) * 2**32
    return key


def no_reference(hold: Any, self: Any, request: Any, image: Any) -> bool:
    found: bool = hold(self, request, image)
    self.entries[image.digest].holders.clear() if found else None
    return found


def never_released(_: Any, self: Any, request: Any, kept: Any = ()) -> None:
    """Do nothing."""


def changes_are_not_undone(_: Any, self: Any, changes: Any) -> None:
    """Do nothing."""


def evicted_at_once(launch: Any, self: Any, batch: Any, table: Any) -> Any:
    self.embedded.difference_update(batch.changes.freed)
    return launch(self, batch, table)


def positions_are_indices(_: Any, num_tokens: int, spans: Any) -> Any:
    return tuple([*range(num_tokens)] for _ in range(3)), 0


def delta_of_rows(original: Any, num_tokens: int, spans: Any) -> Any:
    axes, delta = original(num_tokens, spans)
    spans = list(spans)
    return axes, delta - (max(spans[-1].image.rows, spans[-1].image.columns) > 2)


@pytest.mark.parametrize(
    ("target", "mistake"),
    [
        (f"{PACKAGE}.kv_cache.KVCacheManager.cache_key", keys_without_images),
        (f"{PACKAGE}.kv_cache.KVCacheManager.cache_key", keys_of_a_short_digest),
        (f"{PACKAGE}.encoder_cache.EncoderCache.hold", no_reference),
        (f"{PACKAGE}.encoder_cache.EncoderCache.release", never_released),
        (f"{PACKAGE}.encoder_cache.EncoderCache.undo", changes_are_not_undone),
        (f"{__name__}.ImageRunner.launch", evicted_at_once),
        (f"{PACKAGE}.images.mrope_positions", positions_are_indices),
        (f"{PACKAGE}.images.mrope_positions", delta_of_rows),
    ],
)
def test_planted_mistakes_are_caught(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch, caplog: Any, target: str, mistake: Any
) -> None:
    """The schedules can fail: they find each of these mistakes within 200."""
    caplog.set_level(logging.CRITICAL)
    module = module_of("engine")
    plant(monkeypatch, target, mistake)
    with pytest.raises(AssertionError):
        for seed in range(200):
            fuzz(module, seed, LateStream, Counter())
