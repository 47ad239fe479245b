"""`Grammar`: which tokens may come next. llguidance compiles it, and computes the masks."""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from common import LoadedModel, StructuredOutputsParams

from .grammar_compile import compile_grammar, make_tokenizer
from .grammar_trial import Trial, TrialEndedError


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


class GrammarLibrary:
    """Compiles grammars for the vocabulary of a model. Several threads may call it.

    Another process compiles each grammar first. Only what it compiles with little time and memory
    is compiled in this process, where the matcher must be.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.lock = threading.Lock()
        self.tokenizer: Any = None  # of llguidance
        self.idle: list[Trial] = []
        self.busy: dict[StructuredOutputsParams, Trial] = {}

    def __call__(self, structured: StructuredOutputsParams) -> Grammar:
        """Return a grammar in its first state. Raises `ValueError` if it cannot be compiled.

        Raises `TrialEndedError` if `stop` was called in the meantime.
        """
        with self.lock:
            if self.tokenizer is None:
                self._make_tokenizer()
            given = {**asdict(structured), "markers": self.markers}
            trial = self.idle.pop() if self.idle else Trial(self.head)
            self.busy[structured] = trial
        try:
            trial.check(given)
        except TrialEndedError:
            trial = Trial(self.head)
            raise
        finally:
            with self.lock:
                del self.busy[structured]
                self.idle.append(trial)
        return compile_grammar(self.tokenizer, given, self.loaded.eos_token_ids)

    def stop(self, structured: StructuredOutputsParams) -> None:
        """End the compilation of a grammar, if it runs."""
        with self.lock:
            if structured in self.busy:
                self.busy[structured].stop()

    def close(self) -> None:
        """End all compilations, and the processes."""
        with self.lock:
            for trial in self.idle:
                trial.close()
            for trial in self.busy.values():
                trial.stop()

    def _make_tokenizer(self) -> None:
        size, ends = self.loaded.vocab_size, self.loaded.eos_token_ids
        text = _without_special_text(self.loaded.tokenizer, size)
        # Tokens that stand for their text, such as the "<tool_call>" of Qwen, by this text.
        added = self.loaded.tokenizer.added_tokens_decoder.items()
        known = ((str(t.content), i) for i, t in added if not t.special and i < size)
        self.markers = {name: i for name, i in known if _is_renamed(name)}
        self.tokenizer = make_tokenizer(text, size, ends)
        self.head = {"tokenizer": text, "vocab_size": size, "end_token_ids": sorted(ends)}


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
        if token["special"] or _is_renamed(name):
            token["content"] = names[name] = f"<{secrets.token_hex(16)}>"
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(name, name): i for name, i in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(found)


def _is_renamed(name: str) -> bool:
    """Return whether the library takes an added token for a special one, because of its name."""
    return name.startswith("<") and name.endswith(">")
