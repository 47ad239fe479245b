"""I6: the search for stop strings equals a trial of each string at each token, at a low cost."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import SamplingParams
from common.hf.tiny import byte_tokenizer
from common.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from common.text.output_text import OutputText
from common.text.stop_strings import StopStrings
from tests.conftest import EngineFactory, schedules

TOKENIZER = byte_tokenizer()


class Pieces:
    """A detokenizer with given texts for its tokens."""

    def __init__(self, pieces: list[str], last: str) -> None:
        self.pieces, self.last = pieces, last

    def append(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.last


class NaiveText:
    """The definition of the search: it tries each stop string at each token."""

    def __init__(self, detokenizer: Pieces, stop: list[str]) -> None:
        self.detokenizer, self.stop = detokenizer, stop
        self.decoded = self.visible = ""

    def append(self, token_id: int) -> bool:
        if self._add(self.detokenizer.append(token_id)):
            return True
        self.visible = self.decoded[: len(self.decoded) - self._held_back()]
        return False

    def finish(self) -> bool:
        if self._add(self.detokenizer.flush()):
            return True
        self.visible = self.decoded
        return False

    def _add(self, piece: str) -> bool:
        searched = len(self.decoded)
        self.decoded += piece
        found = []
        for stop in self.stop:
            start = self.decoded.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.visible = self.decoded = self.decoded[: min(found)[1]]
        return bool(found)

    def _held_back(self) -> int:
        lengths = range(len(self.decoded), 0, -1)
        ends = (n for n in lengths if any(s.startswith(self.decoded[-n:]) for s in self.stop))
        return next(ends, 0)


def run(text: Any, pieces: list[str]) -> list[tuple[bool, str]]:
    """Return the results of `append` and `finish`, and the visible text after each call."""
    seen: list[tuple[bool, str]] = []
    for token_id in range(len(pieces)):
        seen.append((text.append(token_id), text.visible))
        if seen[-1][0]:
            return seen
    return [*seen, (text.finish(), text.visible)]


texts = st.text(alphabet="abé", max_size=6)


@settings(max_examples=schedules(1000))
@given(
    pieces=st.lists(texts, max_size=12),
    last=texts,
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=7), min_size=1, max_size=6),
)
def test_the_search_equals_its_definition(pieces: list[str], last: str, stops: list[str]) -> None:
    """After each token, the decision and the visible text are those of the definition."""
    text: Any = OutputText(TOKENIZER, SamplingParams(stop=stops))
    text.detokenizer = Pieces(pieces, last)
    assert run(text, pieces) == run(NaiveText(Pieces(pieces, last), stops), pieces)


class Counted(str):
    """A string that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __lt__(self, other: str) -> bool:
        Counted.comparisons += 1
        return str.__lt__(self, other)


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_the_cost_of_a_character_does_not_grow_with_the_strings(count: int) -> None:
    """The number of comparisons stays below two binary searches per character."""
    words = random.Random(0)
    stops = ["".join(words.choices("abcdefgh", k=8)) + "!" for _ in range(count)]
    strings, text = StopStrings(stops), "".join(words.choices("abcdefgh ", k=2000))
    strings.sorted = [Counted(string) for string in strings.sorted]
    Counted.comparisons = 0
    held, place = "", None
    for start in range(0, len(text), 5):
        held, place = strings.find(held, text[start : start + 5])
        assert place is None
    searches = 2 * len(text)
    assert 0 < Counted.comparisons <= searches * (math.log2(count) + 1)


def test_the_same_parameters_are_prepared_once() -> None:
    params = SamplingParams(stop=["a", "b"])
    assert OutputText(TOKENIZER, params).stop is OutputText(TOKENIZER, params).stop
    assert OutputText(TOKENIZER, SamplingParams()).stop is None


def test_ten_thousand_stop_strings_are_served() -> None:
    params = SamplingParams(stop=[f"stop word number {number}!" for number in range(10_000)])
    text = OutputText(TOKENIZER, params)
    ids = TOKENIZER.encode("so stop word number 7, and stop word number 77! more")
    assert any(text.append(token_id) for token_id in ids)
    assert text.visible == "so stop word number 7, and "


@pytest.mark.parametrize(
    ("stop", "limit"),
    [(["ab"] * (MAX_STOP_STRINGS + 1), "10000"), (["b", "a" * (MAX_STOP_LENGTH + 1)], "1000")],
)
def test_more_than_is_prepared_quickly_is_refused(stop: list[str], limit: str) -> None:
    with pytest.raises(ValueError, match=f"stop must .*{limit}.*got"):
        SamplingParams(stop=stop)


def test_a_token_is_not_compared_with_all_stop_token_ids(make_engine: EngineFactory) -> None:
    assert SamplingParams(stop_token_ids=[3, 1]) == SamplingParams(stop_token_ids=(3, 1))
    engine = make_engine()
    engine.add_request([1, 2], SamplingParams(stop_token_ids=list(range(100, 200))))
    [request] = engine.core.scheduler.waiting
    equal = 0

    class Asked(int):
        def __eq__(self, other: object) -> bool:
            nonlocal equal
            equal += 1
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    assert Asked(199) in request.stop_token_ids and Asked(200) not in request.stop_token_ids
    assert 1 <= equal < 10
