"""structured_output with the library: what is allowed, what is refused, and whole documents."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common import EMBEDDED_MODEL, SamplingParams, StructuredOutputsParams
from common.hf.tiny import byte_tokenizer
from common.sampling.structured import MAX_CHARACTERS, MAX_CHOICES
from tests.conftest import EngineFactory, ModuleOf, shared_model
from tests.helpers import grammar_hunt
from tests.helpers.deselected import thorough_except
from tests.helpers.oracle import drain, greedy
from tests.helpers.schemas import schema

pytestmark = [pytest.mark.since("structured_output"), pytest.mark.extra("grammar")]

PROMPT = [5, 6, 7]


def object_of(**properties: Any) -> StructuredOutputsParams:
    """Return the grammar of an object with these properties, and no others."""
    return StructuredOutputsParams(
        json={
            "type": "object", "properties": properties, "required": [*properties],
            "additionalProperties": False,
        }
    )  # fmt: skip


COLORS = object_of(color={"enum": ["red", "green"]}, dark={"type": "boolean"})
BOOLEANS = object_of(a={"type": "boolean"}, b={"type": "boolean"})


def regex(pattern: str, max_tokens: int = 60, **more: Any) -> SamplingParams:
    return params_of(StructuredOutputsParams(regex=pattern), max_tokens, **more)


def params_of(
    grammar: StructuredOutputsParams, max_tokens: int = 60, **more: Any
) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "structured_outputs": grammar, **more}
    )


def answers(engine: Any, params: list[SamplingParams], prompt: list[int] = PROMPT) -> list[Any]:
    outputs = engine.generate([[*prompt, i] for i in range(len(params))], params, progress=False)
    return [output.outputs[0] for output in outputs]


def library(module_of: ModuleOf, size: int = 300, rows: int | None = None) -> Any:
    """Return the compiler for a vocabulary of `size` tokens, with more `rows` in the embedding."""
    tokenizer = byte_tokenizer(size)
    loaded = SimpleNamespace(
        tokenizer=tokenizer,
        vocab_size=rows or size,
        eos_token_ids=frozenset({tokenizer.eos_token_id, tokenizer.eos_token_id + 2}),
    )
    return module_of("grammar").GrammarLibrary(loaded)


def allowed(compiler: Any, grammar: Any) -> set[int]:
    bits = np.full(-(-compiler.loaded.vocab_size // 32), -1, np.int32)
    grammar.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())


def compile_regex(compiler: Any, pattern: str) -> Any:
    return compiler(StructuredOutputsParams(regex=pattern))


# --- outputs of the engine


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_hundred_schemas(make_engine: EngineFactory, temperature: float) -> None:
    """Every output parses and validates, or `length` says that it was cut."""
    from jsonschema import Draft202012Validator

    chance, engine = random.Random(int(temperature)), make_engine(max_num_seqs=32)
    schemas = [schema(chance, 2) for _ in range(100)]
    params = [
        params_of(StructuredOutputsParams(json=s), 120, temperature=temperature, seed=i)
        for i, s in enumerate(schemas)
    ]
    found = answers(engine, params)
    for wanted, completion in zip(schemas, found, strict=True):
        assert completion.finish_reason in ("stop", "length"), completion.error
        if completion.finish_reason == "stop":
            Draft202012Validator(wanted).validate(json.loads(completion.text))
    assert sum(completion.finish_reason == "stop" for completion in found) > 80


def test_each_mask_reaches_its_own_row(make_engine: EngineFactory) -> None:
    """Plain rows give the tokens that they give alone; later, another request has row 0."""
    engine = make_engine(max_num_seqs=4)
    plain = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    alone = [make_engine().generate([[*PROMPT, i]], plain, progress=False)[0] for i in (0, 2)]
    mixed = [plain, regex("(ab){9}"), plain, params_of(COLORS), regex("[xy]{12}z"), regex("no|yes")]
    found = answers(engine, mixed)
    assert [found[i].token_ids for i in (0, 2)] == [o.outputs[0].token_ids for o in alone]
    assert found[1].text == "ab" * 9 and re.fullmatch("[xy]{12}z", found[4].text)
    assert json.loads(found[3].text).keys() == {"color", "dark"} and found[5].text in ("no", "yes")
    assert {completion.finish_reason for completion in found[1:2] + found[3:]} == {"stop"}


def test_a_slow_grammar_is_never_late(make_engine: EngineFactory, module_of: ModuleOf) -> None:
    """`accept` and `fill` are slow, and the tokens are those without overlap."""
    grammar_class, texts = module_of("grammar_compile").MatcherGrammar, list[str]()
    accept = grammar_class.accept

    def slow(self: Any, token_id: int) -> bool:
        time.sleep(0.003)
        return bool(accept(self, token_id))

    grammar_class.accept = slow
    try:
        for overlap in (True, False):
            engine = make_engine(enable_overlap=overlap)
            found = answers(
                engine, [regex("(ab){20}"), regex("[a-f]{15}", temperature=1.0, seed=1)]
            )
            texts.append(found[1].text)
            assert found[0].text == "ab" * 20 and found[0].finish_reason == "stop"
    finally:
        grammar_class.accept = accept
    assert texts[0] == texts[1] and re.fullmatch("[a-f]{15}", texts[0])


def test_penalties_n_and_bans_respect_the_grammar(make_engine: EngineFactory) -> None:
    engine = make_engine()
    grammar = StructuredOutputsParams(regex="[ab]{3}")
    params = params_of(grammar, n=4, temperature=1.5, seed=7, presence_penalty=2.0)
    (output,) = engine.generate([PROMPT], params, progress=False)
    assert len(output.outputs) == 4 and len(engine.core.scheduler.grammars.compiler.cache) == 1  # type: ignore[attr-defined]
    assert all(re.fullmatch("[ab]{3}", completion.text) for completion in output.outputs)
    a, b = (shared_model("tiny-llama").tokenizer.encode(letter)[0] for letter in "ab")
    (banned,) = answers(engine, [regex("[ab]{9}", logit_bias={a: -100})])
    assert banned.token_ids[:-1] == [b] * 9
    (penal,) = answers(engine, [regex("[a-h]{8}", presence_penalty=2.0, repetition_penalty=100.0)])
    assert sorted(penal.text) == list("abcdefgh"), "each letter is chosen once"


def test_requests_one_step_apart_share_no_state(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, regex("[ab]{3}"), "first")
    engine.step()
    engine.step()
    engine.add_request(PROMPT, regex("[ab]{3}"), "second")
    finals = drain(engine)
    texts = [finals[name][-1].outputs[0].text for name in ("first", "second")]
    assert texts[0] == texts[1] and len(texts[0]) == 3


def test_small_pools_retract_and_lose_nothing(make_engine: EngineFactory) -> None:
    params = [regex("(ab|cd){9}e", temperature=1.0, seed=i) for i in range(5)]
    expected = [completion.text for completion in answers(make_engine(), params)]
    small: Any = make_engine(page_size=1, num_pages=56)
    small.core.scheduler.admission.new_token_ratio = 0.0
    assert [completion.text for completion in answers(small, params)] == expected
    assert small.stats().num_retractions > 0
    assert all(re.fullmatch("(ab|cd){9}e", text) for text in expected)


def test_a_model_that_prefers_newlines_ends(make_engine: EngineFactory) -> None:
    """Whitespace is fixed: 24 tokens of a byte tokenizer, and the end."""
    newline = shared_model("tiny-llama").tokenizer.encode("\n")[0]
    engine = make_engine()
    (completion,) = answers(engine, [params_of(BOOLEANS, logit_bias={newline: 100.0})])
    size = len(completion.token_ids)
    assert completion.finish_reason == "stop" and size <= 26 and "\n" not in completion.text
    for max_tokens, reason in ((size, "stop"), (size - 1, "length")):
        (again,) = answers(engine, [params_of(BOOLEANS, max_tokens, logit_bias={newline: 100.0})])
        assert again.finish_reason == reason and again.text == completion.text


def test_no_token_is_left(make_engine: EngineFactory) -> None:
    """`min_tokens` forbids the end, and the grammar allows nothing else: an error, for it alone."""
    engine = make_engine()
    choice = StructuredOutputsParams(choice=["a"])
    plain = greedy(12, ignore_eos=True)
    (alone,) = answers(make_engine(), [plain])
    found = answers(engine, [plain, params_of(choice, min_tokens=10), params_of(choice)])
    assert found[1].finish_reason == "error" and "min_tokens" in (found[1].error or "")
    assert found[0].token_ids == alone.token_ids and found[2].text == "a"


def test_log_probabilities_are_those_of_the_model(make_engine: EngineFactory) -> None:
    """Before the mask: finite numbers for the likeliest tokens, allowed or not."""
    engine = make_engine()
    (completion,) = answers(
        engine, [params_of(StructuredOutputsParams(choice=["a", "b"]), logprobs=5)]
    )
    assert len(completion.logprobs) == 2
    for entry, token in zip(completion.logprobs, completion.token_ids, strict=True):
        assert token in entry and len(entry) >= 5 and np.isfinite(list(entry.values())).all()


def test_cut_in_the_middle_of_a_character(make_engine: EngineFactory) -> None:
    engine = make_engine()
    for max_tokens in range(1, 6):
        (completion,) = answers(engine, [regex("[😀-🙏]", max_tokens)])
        assert completion.finish_reason == ("stop" if max_tokens == 5 else "length")
        assert ("😀" <= completion.text <= "🙏") == (max_tokens >= 4)


@pytest.mark.parametrize(
    "model", thorough_except(("tiny-llama",), ["tiny-llama", EMBEDDED_MODEL], "the real model")
)
def test_the_text_of_a_special_token_is_spelled(make_engine: EngineFactory, model: str) -> None:
    """Ordinary tokens spell it, also that of the end token. The special token is no text."""
    added = shared_model(model).tokenizer.added_tokens_decoder.values()
    texts = [text for token in added if token.special for text in (str(token), f"a{token}b")]
    expected = [t for text in texts for t in (text, text, json.dumps(text), f"z{text}")]
    wanted = [
        params_of(grammar)
        for text in texts
        for grammar in (
            StructuredOutputsParams(choice=[text]), StructuredOutputsParams(regex=re.escape(text)),
            StructuredOutputsParams(json={"const": text}),
            StructuredOutputsParams(regex=f"[xyz]{re.escape(text)}"),
        )
    ]  # fmt: skip
    engine = make_engine(model, max_num_seqs=len(wanted), max_model_len=64)
    found = answers(engine, wanted)
    assert [c.error for c in found if c.finish_reason != "stop"] == []
    assert [re.sub("^[xyz]", "z", c.text) for c in found] == expected


@pytest.mark.parametrize("is_special", [True, False])
def test_an_added_token_is_spelled(module_of: ModuleOf, is_special: bool) -> None:
    """Also one past the vocabulary of the model, and one that is not special."""
    compiler = library(module_of, 300, 310)
    compiler.loaded.tokenizer.add_tokens(["<tool>", "tool"], special_tokens=is_special)
    for text in ("<tool>", "x<tool>y"):
        grammar, tokens = compile_regex(compiler, text), list[int]()
        while not (mask := allowed(compiler, grammar)) & compiler.loaded.eos_token_ids:
            tokens.append(min(mask))
            assert grammar.accept(tokens[-1]), grammar.error
        assert compiler.loaded.tokenizer.decode(tokens) == text
        assert 300 not in tokens and (301 in tokens) == (not is_special)


def test_each_character_of_a_choice(make_engine: EngineFactory) -> None:
    """All of ASCII, and characters that are written with quotes, lines or surrogates elsewhere."""
    texts = [*map(chr, range(128)), "\x80\x85", "\u2028\u2029", "😀", "\\n", '"', "a\nb", "/ | ()"]
    wanted = [params_of(StructuredOutputsParams(choice=[f"<{text}>"])) for text in texts]
    found = answers(make_engine(max_num_seqs=64), wanted)
    assert [completion.text for completion in found] == [f"<{text}>" for text in texts]


@pytest.mark.parametrize("size", [1, 9])
def test_as_many_choices_as_the_limit_says(module_of: ModuleOf, size: int) -> None:
    compiler = library(module_of)
    choices = [f"{number:0{size}x}"[::-1] for number in range(MAX_CHOICES)]
    assert sum(map(len, choices)) <= MAX_CHARACTERS
    grammar = compiler(StructuredOutputsParams(choice=choices))
    encode, end = compiler.loaded.tokenizer.encode, min(compiler.loaded.eos_token_ids)
    for choice in (choices[0], choices[17], choices[-1]):
        assert follows(grammar, [*encode(choice), end])
    assert not follows(grammar, encode("x"))


HOSTILE: list[Any] = [
    {"regex": "("}, {"regex": "(a{1000}){1000}"}, {"regex": "(" * 49_000 + "a" + ")" * 49_000},
    {"regex": "(?=a)b"}, {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"json": '{"items":' * 200 + "{}" + "}" * 200}, {"json": {"$ref": "#"}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"type": "nothing"}}, {"json": {"type": "string", "format": "nothing"}},
    {"json": {"x-guidance": {"lenient": True}, "not": {}}},
    {"choice": ["a" * 50_000, "b" * 50_000]},
]  # fmt: skip


@pytest.mark.parametrize("wanted", HOSTILE, ids=lambda wanted: str(wanted)[:30])
def test_hostile_grammars_are_refused_alone(make_engine: EngineFactory, wanted: Any) -> None:
    """I4: where the parameters are made, or as the end of the request, with the cause."""
    engine = make_engine()
    try:
        grammar = StructuredOutputsParams(**wanted)
    except ValueError as error:
        assert "structured_outputs" in str(error)
        return
    bad, good = answers(engine, [params_of(grammar), regex("[ab]{4}")])
    assert bad.finish_reason == "error" and bad.error.startswith("structured_outputs"), bad
    assert len(bad.error) < 400 and re.fullmatch("[ab]{4}", good.text)


@pytest.mark.parametrize(
    ("wanted", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"contains": {}}}}, "contains"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "properties"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ],
)
def test_unsupported_keywords_are_named(
    module_of: ModuleOf, wanted: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(ValueError, match=f'"{keyword}"'):
        library(module_of)(StructuredOutputsParams(json=wanted))


@pytest.mark.parametrize(
    "text", ['{"minimum": 1%s}' % ("0" * 30), '{"const": "\\ud83d"}', '{"x-guidance": {}}']
)
def test_an_error_of_the_library_names_the_field(module_of: ModuleOf, text: str) -> None:
    """Also where the library cannot even read the schema."""
    with pytest.raises(ValueError, match="^structured_outputs cannot be compiled: "):
        library(module_of)(StructuredOutputsParams(json=text))


BOUNDS = [-10, -1.5, -1, -0.5, 0, 0.001, 0.5, 1, 1.5, 2.0, 2.25, 10]
NUMBERS = [
    *(f"{sign}{x}" for x in (0, 1, 2, 10, "0.0", "0.5", "1.0", "1.5") for sign in ("", "-")),
    "0.001", "2.25", "1e1", "-1e1", "0e5", "5e-1", "100",
]  # fmt: skip


def test_no_number_outside_its_range_is_accepted(module_of: ModuleOf) -> None:
    """Bounds that are excluded or not. A range that would not be exact is refused by name."""
    from jsonschema import Draft202012Validator

    compiler, num_accepted, num_refused = library(module_of), 0, 0
    end = min(compiler.loaded.eos_token_ids)
    for low, high in itertools.product(BOUNDS, BOUNDS):
        for lower, upper in itertools.product(
            ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
        ):
            wanted = {"type": "number", lower: low, upper: high}
            try:
                grammar = compiler(StructuredOutputsParams(json={"anyOf": [wanted]}))
            except ValueError as error:
                num_refused += "is not supported" in str(error)
                continue
            for text in NUMBERS:
                if follows(grammar, [*compiler.loaded.tokenizer.encode(text), end]):
                    assert Draft202012Validator(wanted).is_valid(json.loads(text)), (text, wanted)
                    num_accepted += 1
    assert num_accepted > 1000 and 0 < num_refused < 60


# --- masks, without an engine


@pytest.mark.parametrize("size", [31, 32, 33, 300])
@pytest.mark.parametrize("extra", [0, 1, 40])
def test_columns_without_a_token_are_never_allowed(
    module_of: ModuleOf, size: int, extra: int
) -> None:
    compiler = library(module_of, size, size + extra)
    first = compiler.loaded.tokenizer.convert_ids_to_tokens(0)
    grammar = compile_regex(compiler, f"{re.escape(first)}|{re.escape(first)}.+")
    specials = set(compiler.loaded.tokenizer.all_special_ids)
    assert allowed(compiler, grammar) <= set(range(size)) - specials
    assert grammar.accept(0)
    assert allowed(compiler, grammar) & specials == compiler.loaded.eos_token_ids
    assert max(allowed(compiler, grammar)) < size


def test_end_tokens_are_legal_exactly_where_the_grammar_may_end(module_of: ModuleOf) -> None:
    compiler = library(module_of)
    ends, encode = compiler.loaded.eos_token_ids, compiler.loaded.tokenizer.encode
    number = compile_regex(compiler, "[0-9]+")
    assert not allowed(compiler, number) & ends and not any(map(number.accept, ends))
    assert number.accept(encode("4")[0])
    assert allowed(compiler, number) == ends | {encode(digit)[0] for digit in "0123456789"}
    choice = compiler(StructuredOutputsParams(choice=["yes", "no"]))
    assert all(map(choice.accept, encode("no")))
    assert allowed(compiler, choice) == ends and all(map(choice.accept, ends))
    string = compiler(StructuredOutputsParams(json={"type": "string"}))
    assert string.accept(encode('"')[0])
    specials = set(compiler.loaded.tokenizer.all_special_ids)
    assert not allowed(compiler, string) & specials
    assert all(string.accept(token) for letter in "<|im_end|>" for token in encode(letter))


def test_a_refused_token_changes_nothing(module_of: ModuleOf) -> None:
    """A token of several characters that fails at its last one leaves the mask bit-equal."""
    compiler = library(module_of, 9000)
    token = compiler.loaded.tokenizer.convert_tokens_to_ids("AAAC")
    grammar = compile_regex(compiler, "A{3}B")
    before = allowed(compiler, grammar)
    assert not grammar.accept(token) and grammar.error == ""
    assert allowed(compiler, grammar) == before
    assert grammar.accept(compiler.loaded.tokenizer.convert_tokens_to_ids("AA"))


PATTERNS = ["(AB|ABC)*D", "[A-C]{2,5}(x|yz)?", "(Aa)+", '"[^"]*": [0-9]', "é[😀-🙏]b*", "A.*B"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_bit_is_that_of_brute_force(module_of: ModuleOf, pattern: str) -> None:
    """A token is allowed if and only if its bytes are, one by one, in a vocabulary of bytes.

    Where the grammar leaves only one next byte, the library chooses among the tokens that are
    right: it allows those of the tokenizer's own encoding.
    """
    compiler, single = library(module_of, 1200), library(module_of, 259)
    chance, tokenizer = random.Random(pattern), compiler.loaded.tokenizer
    plain = [i for i in range(1200) if i not in tokenizer.all_special_ids]
    to_ids = single.loaded.tokenizer.convert_tokens_to_ids
    letters_of = {i: to_ids(list(tokenizer.convert_ids_to_tokens(i))) for i in plain}
    for _ in range(3):
        grammar, by_byte = compile_regex(compiler, pattern), compile_regex(single, pattern)
        for _ in range(12):
            mask, is_forced = allowed(compiler, grammar), len(allowed(single, by_byte)) == 1
            right = {token for token in plain if follows(by_byte, letters_of[token])}
            assert {token for token in plain if grammar.fork().accept(token)} == right
            found = mask & set(plain)
            assert found == right or (is_forced and found and found < right), sorted(found ^ right)
            options = sorted(found)
            if not options:
                break
            token = chance.choice(options)
            assert grammar.accept(token)
            assert all(map(by_byte.accept, letters_of[token]))


def test_half_a_character_leads_into_the_range(module_of: ModuleOf) -> None:
    compiler = library(module_of)
    encode = compiler.loaded.tokenizer.encode
    grammar = compile_regex(compiler, "[😀-🙏]")
    first, second, *_ = encode("😀")
    assert allowed(compiler, grammar) == {first}
    assert grammar.accept(first) and allowed(compiler, grammar) == {second}
    assert grammar.accept(second) and allowed(compiler, grammar) <= set(range(256))


COMBINED: list[dict[str, Any]] = [  # keywords that have to be followed together
    {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 3},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}], "maxLength": 4},
    {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 20},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5.5},
    {"enum": [1, 5, "5", 9], "type": "integer", "minimum": 4},
    {"anyOf": [{"type": "integer", "maximum": 3}, {"const": "a"}], "minimum": 1},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"const": 1}, "maxItems": 3},
    {"type": "object", "patternProperties": {"^x": {"const": 0}}, "additionalProperties": False},
    {"type": "object", "required": ["b"], "additionalProperties": {"type": "null"},
     "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "minimum": 0}}, "maximum": 3},
]  # fmt: skip


def test_random_walks_give_only_valid_documents(module_of: ModuleOf) -> None:
    """Thirty schemas, and ten walks through the masks of each."""
    from jsonschema import Draft202012Validator

    compiler, chance = library(module_of), random.Random(5)
    decode, ends = compiler.loaded.tokenizer.decode, compiler.loaded.eos_token_ids
    for wanted in [*COMBINED, *[schema(chance) for _ in range(20)]]:
        start = compiler(StructuredOutputsParams(json=wanted))
        for _ in range(10):
            grammar, tokens = start.fork(), list[int]()
            while not (mask := allowed(compiler, grammar)) & ends:
                tokens.append(chance.choice(sorted(mask)))
                assert grammar.accept(tokens[-1])
                assert len(tokens) < 2000
            text = decode(tokens)
            if "�" not in text:  # a walk by bytes may write any character
                Draft202012Validator(wanted).validate(json.loads(text))


def test_twenty_schemas_on_eight_threads(module_of: ModuleOf) -> None:
    """Each grammar accepts its own example, and refuses the other nineteen."""
    compiler = library(module_of)
    manager = module_of("grammar_manager").GrammarCompiler(compiler)
    wanted = [StructuredOutputsParams(json={"const": f"value {i}"}) for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        grammars = [future.result() for future in pool.map(manager.submit, wanted * 3)]
    for number, grammar in enumerate(grammars[:20]):
        assert grammar is grammars[number + 20], "equal schemas share one grammar"
        for other in range(20):
            tokens = compiler.loaded.tokenizer.encode(f'"value {other}"')
            assert follows(grammar, tokens) == (number == other)
    manager.close()


def follows(grammar: Any, tokens: list[int]) -> bool:
    copy = grammar.fork()
    return all(copy.accept(token) for token in tokens)


EXPENSIVE = {
    "processor time": StructuredOutputsParams(regex=r"(\w*\d*)" * 5000),
    "without end": StructuredOutputsParams(json='{"type": "integer", "multipleOf": 99999989}'),
}


@pytest.mark.thorough("it compiles grammars that take seconds")
@pytest.mark.parametrize("name", EXPENSIVE)
def test_a_grammar_that_needs_too_much_is_refused(name: str, module_of: ModuleOf) -> None:
    """The process that tries it is ended, and the next grammar has another one."""
    compiler = library(module_of)
    for _ in range(2):
        with pytest.raises(ValueError, match="it needs more than"):
            compiler(EXPENSIVE[name])
    assert compiler(StructuredOutputsParams(regex="ab")).error == ""
    compiler.close()


def test_a_compilation_without_a_waiting_call_is_ended(module_of: ModuleOf) -> None:
    """More of them than there are threads; then an ordinary grammar is compiled at once."""
    compiler = module_of("grammar_manager").GrammarCompiler(library(module_of))
    for number in range(4):
        schema = {"type": "integer", "multipleOf": 99_999_989 + number}
        endless = StructuredOutputsParams(json=schema)
        future = compiler.submit(endless)
        deadline = time.monotonic() + 60
        while endless not in compiler.compile.busy:
            assert time.monotonic() < deadline, "the compilation has not begun"
            time.sleep(0.001)
        compiler.abandon(future)
        assert isinstance(future.exception(60), module_of("grammar_trial").TrialEndedError)
    ordinary = compiler.submit(StructuredOutputsParams(choice=["a", "b"]))
    assert ordinary.result(60).error == ""
    compiler.close()


@pytest.mark.thorough("a hundred random grammars, some of them hopeless")
def test_no_grammar_of_a_hunt_is_expensive(milestone: str) -> None:
    """What another process has let through costs little here. SERVING.md has a longer hunt."""
    found = grammar_hunt.hunt(shared_model("tiny-llama"), 100, seed=5)
    assert found.accepted > 20 and found.refused > 20
    assert found.bytes < 200 << 20, found.worst["bytes"]
