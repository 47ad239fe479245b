"""`Grammar`: which tokens may come next. llguidance compiles it, and computes the masks."""

from __future__ import annotations

import json
import secrets
import threading
from typing import Any, Protocol

import numpy as np

from common import LoadedModel, StructuredOutputsParams

from .bitmask import WORD

# Bounds of the work for one grammar. The library's own bounds allow several seconds of work.
LIMITS: Any = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "verbose_errors": False}
# No optional whitespace: a model that prefers a newline would write nothing else.
SEPARATORS: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Grammar(Protocol):
    """The place of one request in a grammar."""

    @property
    def error(self) -> str:
        """Return why the grammar cannot go on; an empty text if it can."""

    def fork(self) -> Grammar:
        """Return a copy with a state of its own."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token. If it is not allowed, return False, and change nothing."""

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that are allowed next, and clear all others, [W] int32."""


class MatcherGrammar:
    """A grammar of llguidance. End tokens are allowed exactly where the grammar may end."""

    def __init__(self, matcher: Any, end_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self.end_token_ids = end_token_ids

    @property
    def error(self) -> str:
        text: str = self.matcher.get_error() if self.matcher.is_error() else ""
        return " ".join(text.replace("<non-verbose/>", "").split())

    def fork(self) -> MatcherGrammar:
        return MatcherGrammar(self.matcher.deep_copy(), self.end_token_ids)

    def accept(self, token_id: int) -> bool:
        if token_id in self.end_token_ids:
            return bool(self.matcher.is_accepting())
        return self.matcher.try_consume_tokens([token_id]) == 1

    def fill(self, bits: np.ndarray) -> None:
        bits[:] = np.frombuffer(self.matcher.compute_bitmask(), np.int32)[: len(bits)]
        words = bits.view(np.uint32)
        for word, bit in (divmod(token_id, WORD) for token_id in self.end_token_ids):
            words[word] &= ~np.uint32(1 << bit)
            if self.matcher.is_accepting():
                words[word] |= np.uint32(1 << bit)


class GrammarLibrary:
    """Compiles grammars for the vocabulary of a model. Several threads may call it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.lock = threading.Lock()
        self.tokenizer: Any = None  # of llguidance; it takes half a second to make

    def __call__(self, structured: StructuredOutputsParams) -> Grammar:
        """Return a grammar in its first state. Raises `ValueError` if it cannot be compiled."""
        import llguidance  # the extra `grammar`

        with self.lock:
            if self.tokenizer is None:
                self.tokenizer = self._make_tokenizer()
        limits = llguidance.LLParserLimits(**LIMITS)
        try:
            text = _grammar_text(structured)
        except ValueError as cause:  # an integer of more than 64 bits, half a surrogate pair
            raise ValueError(f"structured_outputs cannot be compiled: {str(cause)[:300]}") from None
        matcher = llguidance.LLMatcher(self.tokenizer, text, log_level=0, limits=limits)
        grammar = MatcherGrammar(matcher, self.loaded.eos_token_ids)
        if error := grammar.error or self._try_first_tokens(grammar.fork()):
            raise ValueError(f"structured_outputs cannot be compiled: {error[:300]}")
        return grammar

    def _try_first_tokens(self, grammar: MatcherGrammar) -> str:
        """Return the error of the first two tokens, or "". The library does most of its work there.

        It finds with the second token that a text of more than some 30,000 characters is too long.
        """
        bits = np.zeros(-(-self.tokenizer.vocab_size // WORD), np.int32)
        for _ in range(2):
            grammar.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if len(allowed) == 0:
                return grammar.error or "no token of the vocabulary is allowed at its beginning"
            grammar.accept(int(allowed[0]))
        return grammar.error

    def _make_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        size = self.loaded.vocab_size
        text = _without_special_text(self.loaded.tokenizer, size)
        return LLTokenizer(text, size, sorted(self.loaded.eos_token_ids))


def _without_special_text(tokenizer: Any, vocab_size: int) -> str:
    """Return a tokenizer as JSON. Its special tokens have random names, which no grammar contains.

    Added tokens that the model does not have, with ids from `vocab_size` on, are left out.

    Where a grammar allows only one text, such as "<|im_start|>", the library allows the tokens of
    the tokenizer's own encoding, but never a special token. With its own name, the special token
    would be that encoding, and no token would be left.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"structured_outputs: {type(tokenizer).__name__} is no fast tokenizer")
    found = json.loads(tokenizer.backend_tokenizer.to_str())
    found["padding"] = found["truncation"] = None  # they would change the encoding
    found["added_tokens"] = [t for t in found["added_tokens"] if t["id"] < vocab_size]
    model, names = found["model"], dict[str, str]()
    for token in found["added_tokens"]:
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):  # the library's rule
            token["content"] = names[name] = f"<{secrets.token_hex(16)}>"
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): i for name, i in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(found)


def _grammar_text(structured: StructuredOutputsParams) -> str:
    """Return a grammar in a language of llguidance."""
    from llguidance import LLMatcher

    if structured.regex is not None:
        return str(LLMatcher.grammar_from_regex(structured.regex))
    if structured.choice is not None:
        # Inside a terminal (an upper-case name), the library takes more than 2,000 choices.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.choice)
        choices = choices.replace("\x7f", "\\u007f")  # which JSON allows and the library does not
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    schema = json.loads(str(structured.json))
    if "x-guidance" in schema:
        raise ValueError("json must not have the keyword 'x-guidance'")
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=SEPARATORS))
