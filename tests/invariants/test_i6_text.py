"""I6: streamed text has no half character and no start of a stop string, and its pieces join."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from common import SamplingParams
from common.hf.tiny import byte_tokenizer
from common.text.output_text import REPLACEMENT, IncrementalDetokenizer, OutputText
from tests.conftest import EngineFactory, shared_model
from tests.exercises.by_hand import watch
from tests.helpers.oracle import greedy, reference

pytestmark = pytest.mark.streams(electives=False)

TOKENIZER = byte_tokenizer()
PROMPT = list(range(40, 57))


def pieces_of(token_ids: list[int], params: SamplingParams | None = None) -> list[str]:
    """Return the visible text after each token, and after the end."""
    text = OutputText(TOKENIZER, params or SamplingParams())
    seen = []
    for token_id in token_ids:
        stopped = text.append(token_id)
        seen.append(text.visible)
        if stopped:
            return seen
    text.finish()
    return [*seen, text.visible]


def assert_only_grows(seen: list[str]) -> None:
    for before, after in pairwise(seen):
        assert after.startswith(before), "I6: text that was shown has changed"


def token_ids_of(data: bytes) -> list[int]:
    """Return the byte tokenizer's ids of any bytes, valid text or not."""
    return [_id_of_byte()[byte] for byte in data]


@functools.cache
def _id_of_byte() -> dict[int, int]:
    """Return the id of each byte.

    In the byte-level alphabet, a printable byte is its own character. The other bytes are the
    characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    characters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    ids = TOKENIZER.get_vocab()
    return {byte: ids[c] for byte, c in characters.items()}


@given(st.text(max_size=40))
def test_text_survives_token_by_token(text: str) -> None:
    assume("\ufffd" not in text)
    data = text.encode("utf-8", errors="ignore")
    seen = pieces_of(token_ids_of(data))
    assert_only_grows(seen)
    assert not any(REPLACEMENT in shown for shown in seen), "I6: half a character was shown"
    assert seen[-1] == data.decode()


@settings(max_examples=500)
@given(st.lists(st.sampled_from(b"a \x80\xc3\xa9\xe2\x82\xac\xf0\x9f\x98"), max_size=24).map(bytes))
def test_invalid_bytes_join_to_the_whole_decoding(data: bytes) -> None:
    seen = pieces_of(token_ids_of(data))
    assert_only_grows(seen)
    assert seen[-1] == TOKENIZER.decode(token_ids_of(data)) == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("data", "final"),
    [
        (b"caf\xc3", "caf\ufffd"),  # cut in the middle of a character
        (b"\xa9 bien", "\ufffd bien"),  # the first half of the character is in the prompt
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xf0\xf0\x9f\x82", "\ufffd\ufffd"),
        (b"\xf0\x9f\x98\xf0\x9f\x98\x80", "\ufffd😀"),
        ("😀😀".encode(), "😀😀"),
        (b"\x80" * 300, "\ufffd" * 300),
    ],
)
def test_broken_characters(data: bytes, final: str) -> None:
    assert pieces_of(token_ids_of(data))[-1] == final


def test_tokens_that_decode_to_nothing() -> None:
    """An embedding may have more rows than the tokenizer has tokens."""
    unknown = 5000
    assert pieces_of([*token_ids_of(b"\xf0"), unknown, unknown, unknown])[-1] == "\ufffd"
    assert pieces_of([unknown] * 40 + token_ids_of(b"ok"))[-1] == "ok"


def test_a_tokenizer_that_fails_at_unknown_tokens() -> None:
    """Its `decode` raises. In a step, this error would end the other requests too."""
    tokenizer = ByT5Tokenizer()
    with pytest.raises(ValueError, match="bytes must be in range"):
        tokenizer.decode([5000])
    detokenizer = IncrementalDetokenizer(tokenizer, True)
    euro = tokenizer.encode("a€b", add_special_tokens=False)
    token_ids = [5000, *euro[:2], 5000, *euro[2:], 5000, *[5000] * 20, *euro]
    assert "".join(map(detokenizer.append, token_ids)) + detokenizer.flush() == "a€ba€b"


def test_a_stop_string_in_what_is_flushed() -> None:
    """Here the stop string appears only because the output ends inside a character."""
    text = OutputText(TOKENIZER, SamplingParams(stop=["\ufffd"]))
    assert not any(text.append(token_id) for token_id in token_ids_of(b"ab\xf0\x9f"))
    assert text.finish() and text.visible == "ab"


def test_a_character_appears_when_it_is_complete() -> None:
    assert pieces_of(token_ids_of("a😀b".encode())) == ["a", "a", "a", "a", "a😀", "a😀b", "a😀b"]


def test_a_replacement_character_of_the_model_holds_nothing_back() -> None:
    """U+FFFD may be a genuine part of the output: the text after it appears with its tokens."""
    assert pieces_of(token_ids_of("a\ufffdbc".encode()))[-3:-1] == ["a\ufffdb", "a\ufffdbc"]


def test_one_tokenizer_serves_sixteen_threads() -> None:
    """The server encodes and renders in one thread, and the engine decodes in another one."""
    texts = [f"text {i} \U0001f600 " * (1 + i % 5) for i in range(16)]
    expected = [TOKENIZER.encode(text) for text in texts]

    def visit(i: int) -> None:
        chat = [{"role": "user", "content": texts[i]}]
        for _ in range(20):
            assert TOKENIZER.encode(texts[i]) == expected[i]
            assert pieces_of(expected[i])[-1] == texts[i]
            assert texts[i] in TOKENIZER.apply_chat_template(chat, tokenize=False)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(visit, range(16)))


@pytest.mark.parametrize("data", [b"\x80" * 3000, b"word " * 400, "😀".encode() * 500])
def test_work_per_token_does_not_grow(data: bytes) -> None:
    """The window that is decoded again for each token stays small, even for lone bytes."""
    detokenizer, decoded = IncrementalDetokenizer(TOKENIZER, True), list[int]()
    watch(detokenizer, "decode", lambda token_ids: decoded.append(len(token_ids)))
    token_ids = token_ids_of(data)
    for token_id in token_ids:
        detokenizer.append(token_id)
        assert len(detokenizer.window) <= 20
    assert sum(decoded) < len(token_ids) * 40, "the work per token grows with the output"


def test_tokenizers_that_write_spaces_between_tokens() -> None:
    """As in SentencePiece, only the first token loses its leading space."""
    vocab = {
        "<unk>": 0,
        "▁the": 1,
        "▁quick": 2,
        "er": 3,
        ".": 4,
        **{f"<0x{b:02X}>": 5 + b for b in range(256)},
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    euro = [5 + byte for byte in "€".encode()]
    token_ids = [1, 2, 3, *euro, 1, 4] * 9
    detokenizer = IncrementalDetokenizer(tokenizer, True)
    text = "".join(detokenizer.append(token_id) for token_id in token_ids) + detokenizer.flush()
    assert text == "the quicker€ the." + " the quicker€ the." * 8


def test_a_tokenizer_with_a_decode_of_its_own_is_asked() -> None:
    """The library behind the tokenizer must not be called: it does not know this `decode`."""

    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return super()._decode(*args, **kwargs).upper()

    class Hidden(PreTrainedTokenizerFast):
        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return str(super().decode(*args, **kwargs)).replace("b", "*")

    token_ids = token_ids_of(b"abc")
    for kind, expected in ((Shouting, "ABC"), (Hidden, "a*c"), (PreTrainedTokenizerFast, "abc")):
        tokenizer = kind(tokenizer_object=TOKENIZER.backend_tokenizer)
        detokenizer = IncrementalDetokenizer(tokenizer, True)
        assert "".join(map(detokenizer.append, token_ids)) == expected


words = st.text(alphabet="ab", min_size=1, max_size=4)


@given(data=st.text(alphabet="ab ", max_size=30), stops=st.lists(words, min_size=1, max_size=3))
def test_the_first_complete_stop_string_ends_the_text(data: str, stops: list[str]) -> None:
    """The text equals the definition, which tries each character. Shown text never changes."""
    expected, found = data, False
    for end in range(len(data) + 1):
        starts = [end - len(stop) for stop in stops if data[:end].endswith(stop)]
        if starts:
            expected, found = data[: min(starts)], True
            break
    seen = pieces_of(token_ids_of(data.encode()), SamplingParams(stop=stops))
    assert seen[-1:] == [expected] or (not seen and not data)
    assert_only_grows(seen)
    if found:
        for shown in seen:
            assert expected.startswith(shown), "I6: the start of a stop string was shown"


def test_a_false_start_is_shown_in_the_end() -> None:
    params = SamplingParams(stop=["<end>"])
    assert pieces_of(token_ids_of(b"a<enough"), params)[:5] == ["a", "a", "a", "a", "a<eno"]
    assert pieces_of(token_ids_of(b"a<en"), params)[-1] == "a<en"


@settings(max_examples=25)
@given(number=st.integers(0, 10**6))
def test_stop_strings_across_tokens(milestone: str, number: int) -> None:
    """A stop string in the model's own output is found anywhere, and the text ends before it."""
    from tests.conftest import build_engine

    tokenizer = shared_model("tiny-llama").tokenizer
    token_ids = reference("tiny-llama", tuple(PROMPT), 24).token_ids
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True))
    parts = [text[start : start + length] for start in range(21) for length in range(1, 6)]
    stops = [part for part in parts if part and REPLACEMENT not in part]
    stop = stops[number % len(stops)]
    engine = build_engine(milestone)
    outputs = list(engine.stream(PROMPT, greedy(24, stop=[stop])))
    final = outputs[-1].outputs[0]
    assert final.finish_reason == "stop"
    assert final.text == text[: text.find(stop)]
    for output in outputs:
        assert final.text.startswith(output.outputs[0].text)
    decoded = tokenizer.decode(final.token_ids, skip_special_tokens=True)
    assert stop in decoded, "the tokens of the stop string are not in token_ids"


def test_streamed_pieces_join(make_engine: EngineFactory) -> None:
    engine = make_engine()
    params = greedy(40, ignore_eos=True)
    outputs = list(engine.stream(PROMPT, params))
    assert [o.finished for o in outputs] == [False] * 39 + [True]
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 41))
    joined = ""
    for output in outputs:
        piece = output.outputs[0].text[len(joined) :]
        assert output.outputs[0].text.startswith(joined)
        joined += piece
    whole = engine.generate(PROMPT, params)[0].outputs[0]
    tokenizer = engine.loaded.tokenizer
    assert joined == whole.text == tokenizer.decode(whole.token_ids, skip_special_tokens=True)


def test_special_tokens_are_skipped_or_shown() -> None:
    end = TOKENIZER.get_vocab()["<|im_end|>"]
    token_ids = [*token_ids_of(b"hi"), end, *token_ids_of(b"!")]
    assert pieces_of(token_ids)[-1] == "hi!"
    shown = SamplingParams(skip_special_tokens=False)
    assert pieces_of(token_ids, shown)[-1] == "hi<|im_end|>!"


@given(data=st.lists(st.sampled_from([b"a", b"\n", "é".encode(), "😀".encode(), b"\xf0", b"\x80"])))
def test_the_table_of_pieces_changes_no_text(data: list[bytes]) -> None:
    """A byte-level tokenizer gives the same text at the same moments as decoding in a window."""
    fast, slow = (IncrementalDetokenizer(TOKENIZER, True) for _ in range(2))
    assert fast.pieces is not None
    slow.pieces = None
    for token_id in token_ids_of(b"".join(data)):
        assert fast.append(token_id) == slow.append(token_id)
    assert fast.flush() == slow.flush()
