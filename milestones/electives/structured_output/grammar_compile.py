"""Compile a grammar by llguidance. As a script, this file is a process that tries grammars.

A schema of 200 bytes can need minutes, or all memory of the machine, and the library cannot be
stopped. A process can be stopped. It imports nothing of this project, so it starts quickly. See
`grammar_trial.py`.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Collection
from typing import Any

import numpy as np

# Bounds of the work for one grammar. The library's own bounds allow several seconds of work.
LIMITS: Any = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "verbose_errors": False}
# No optional whitespace: a model that prefers a newline would write nothing else.
SEPARATORS: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


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
        for word, bit in (divmod(token_id, 32) for token_id in self.end_token_ids):
            words[word] &= ~np.uint32(1 << bit)
            if self.matcher.is_accepting():
                words[word] |= np.uint32(1 << bit)


def compile_grammar(
    tokenizer: Any, given: dict[str, Any], end_token_ids: Collection[int]
) -> MatcherGrammar:
    """Return a grammar in its first state. Raises `ValueError` if it cannot be compiled.

    tokenizer: of llguidance. given: the fields of `StructuredOutputsParams`, one of them set, and
        `markers`: tokens with a text like "<tool_call>", by this text.
    """
    import llguidance  # the extra `grammar`

    try:
        text = _grammar_text(given)
    except ValueError as cause:  # an integer of more than 64 bits, half a surrogate pair
        raise ValueError(f"structured_outputs cannot be compiled: {str(cause)[:300]}") from None
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    grammar = MatcherGrammar(matcher, frozenset(end_token_ids))
    if error := grammar.error or _try_first_tokens(grammar.fork(), tokenizer.vocab_size):
        raise ValueError(f"structured_outputs cannot be compiled: {error[:300]}")
    return grammar


def make_tokenizer(text: str, vocab_size: int, end_token_ids: Collection[int]) -> Any:
    """Return a tokenizer of llguidance. This takes half a second."""
    from llguidance import LLTokenizer

    return LLTokenizer(text, vocab_size, sorted(end_token_ids))


def _try_first_tokens(grammar: MatcherGrammar, vocab_size: int) -> str:
    """Return the error of the first two tokens, or "". The library does most of its work there.

    It finds with the second token that a text of more than some 30,000 characters is too long.
    """
    bits = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(2):
        grammar.fill(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if len(allowed) == 0:
            return grammar.error or "no token of the vocabulary is allowed at its beginning"
        grammar.accept(int(allowed[0]))
    return grammar.error


def _grammar_text(given: dict[str, Any]) -> str:
    """Return a grammar in a language of llguidance."""
    from llguidance import LLMatcher

    if given["regex"] is not None:
        return str(LLMatcher.grammar_from_regex(given["regex"]))
    if given["choice"] is not None:
        # Inside a terminal (an upper-case name), the library takes more than 2,000 choices.
        choices = " | ".join(_quoted(choice) for choice in given["choice"])
        return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}"))
    if given["structural_tag"] is not None:
        form = json.loads(given["structural_tag"])["format"]
        return str(LLMatcher.grammar_from_lark(_tags_in_lark(form, given["markers"])))
    schema = _own_schema(json.loads(given["json"]))
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=SEPARATORS))


def _own_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if "x-guidance" in schema:
        raise ValueError("json must not have the keyword 'x-guidance'")
    return schema


def _tags_in_lark(form: dict[str, Any], markers: dict[str, int]) -> str:
    """Return a grammar of text with tags. form: see `common/sampling/structural_tag.py`.

    markers: tokens that may stand for a part of a tag.

    A lazy terminal ends where the trigger ends for the first time. So the text before it, and the
    text after the last tag, cannot contain the trigger.
    """
    (trigger,), bodies = form["triggers"], []
    for tag in form["tags"]:
        schema = {**_own_schema(tag["content"]["json_schema"]), "x-guidance": SEPARATORS}
        rest = tag["begin"].removeprefix(trigger)
        parts = (
            _literal(rest, markers),
            f"%json {json.dumps(schema)}",
            _literal(tag["end"], markers),
        )
        bodies.append(" ".join(parts))
    token = f" | text <[{markers[trigger]}]> body" if trigger in markers else ""
    start = {
        (False, False): "tag* text",
        (False, True): "text | tag",
        (True, False): "first tag* text",
        (True, True): "first",
    }[form.get("at_least_one", False), form.get("stop_after_first", False)]
    return (
        f"start: {start}\n"
        "text: TEXT\n"
        "TEXT: /(.|\\n)*/\n"
        f"first: {_literal(trigger, markers)} body\n"
        f"begin[lazy]: TEXT {_quoted(trigger)}\n"
        f"tag: begin body{token}\n"
        f"body: {' | '.join(bodies)}\n"
    )


def _literal(text: str, markers: dict[str, int]) -> str:
    """Return a text for a rule of Lark. A marker in it may be one token, or several."""
    pattern = "|".join(map(re.escape, markers)) or r"(?!)"
    parts = []
    for piece in re.split(f"({pattern})", text):
        if piece in markers:
            parts.append(f"({_quoted(piece)} | <[{markers[piece]}]>)")
        elif piece:  # Lark has no empty strings
            parts.append(_quoted(piece))
    return " ".join(parts)


def _quoted(text: str) -> str:
    """Return a string of Lark."""
    # JSON allows this character, and the library does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def main() -> None:
    """Answer each line of standard input with a line: the error, empty if there is none.

    The first line has the tokenizer and the limits.
    """
    head = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(head["tokenizer"], head["vocab_size"], head["end_token_ids"])
    if (size := _address_space()) is not None:
        _limit(resource.RLIMIT_AS, size + head["bytes"])
    _answer("")
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + head["seconds"])
        error = ""
        try:
            compile_grammar(tokenizer, json.loads(line), head["end_token_ids"])
        except ValueError as refused:
            error = str(refused)
        _answer(error)


def _answer(error: str) -> None:
    sys.stdout.write(json.dumps(error) + "\n")
    sys.stdout.flush()


def _limit(kind: int, value: int) -> None:
    """Lower a limit of this process. What goes beyond it ends the process."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))


def _address_space() -> int | None:
    """Return the bytes of the address space of this process; None where only Linux tells them."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    main()
