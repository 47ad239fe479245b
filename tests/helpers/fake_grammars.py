"""Grammars without a library, and a hash runner with delayed sampling, for tests of scheduling.

A `StepGrammar` allows at each index of the output the tokens of one residue class. A mask that is a
token too early, too late, or of another request changes the tokens.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common import StructuredOutputsParams
from tests.helpers.fake_overlap import FAKE, HashResult, HashRunner
from tests.helpers.fake_paged import VOCAB_SIZE, expected_tokens

CLASSES = 5
END = min(FAKE.eos_token_ids)


def structured(salt: int, length: int) -> StructuredOutputsParams:
    """Return the parameters that `FakeCompiler` reads: `length` tokens, and then the end."""
    return StructuredOutputsParams(json=json.dumps({"salt": salt, "length": length}))


def allowed_tokens(salt: int, output: list[int], length: int) -> list[int]:
    """Return the tokens that may follow: the last token decides about the next one."""
    if len(output) == length:
        return [END]
    place = (salt + len(output) + sum(output[-1:])) % CLASSES
    return [token for token in range(VOCAB_SIZE) if token % CLASSES == place]


def choose(natural: int, allowed: list[int]) -> int:
    """Return the token that the fake sampler chooses in place of the model's own."""
    return allowed[natural % len(allowed)]


def expected_under(prompt: list[int], max_tokens: int, salt: int, length: int) -> list[int]:
    """Return the answer under a `StepGrammar`, computed from the token list alone."""
    output: list[int] = []
    while len(output) < max_tokens and output[-1:] != [END]:
        [natural] = expected_tokens(prompt + output, 1)
        output.append(choose(natural, allowed_tokens(salt, output, length)))
    return output


class StepGrammar:
    """A grammar that checks how it is used."""

    error = ""

    def __init__(self, salt: int, length: int) -> None:
        self.salt = salt
        self.length = length
        self.accepted: list[int] = []
        self.forks: list[StepGrammar] = []

    def fork(self) -> StepGrammar:
        assert not self.accepted, "a compiled grammar is shared: it must stay at its beginning"
        self.forks.append(StepGrammar(self.salt, self.length))
        return self.forks[-1]

    def accept(self, token_id: int) -> bool:
        assert self.accepted[-1:] != [END], "accept after the end"
        if token_id not in allowed_tokens(self.salt, self.accepted, self.length):
            return False
        self.accepted.append(token_id)
        return True

    def fill(self, bits: np.ndarray) -> None:
        assert self.accepted[-1:] != [END], "a mask after the end"
        bits[:] = 0
        words = bits.view(np.uint32)
        for token in allowed_tokens(self.salt, self.accepted, self.length):
            words[token // 32] |= np.uint32(1 << token % 32)


@dataclass
class FakeCompiler:
    """Compiles when a test says so."""

    pending: list[tuple[Future[Any], Any]] = field(default_factory=list)
    compiled: list[StepGrammar] = field(default_factory=list)
    abandoned: list[Future[Any]] = field(default_factory=list)
    at_once: bool = False

    def submit(self, wanted: StructuredOutputsParams) -> Future[Any]:
        self.pending.append((Future(), json.loads(str(wanted.json))))
        future = self.pending[-1][0]
        if self.at_once:
            self.finish(len(self.pending) - 1)
        return future

    def finish(self, number: int = 0, error: Exception | None = None) -> None:
        """End a compilation, with a grammar or with an error."""
        future, wanted = self.pending.pop(number)
        if error is not None:
            future.set_exception(error)
            return
        self.compiled.append(StepGrammar(**wanted))
        future.set_result(self.compiled[-1])

    def abandon(self, future: Future[Any]) -> None:
        """Take note of it, and go on: a compilation may have begun."""
        self.abandoned.append(future)

    def close(self) -> None:
        """Nothing to end."""

    def states(self) -> list[StepGrammar]:
        """Return the state of each request that got a grammar."""
        return [state for grammar in self.compiled for state in grammar.forks]


class MaskRunner(HashRunner):
    """A `HashRunner` that samples steps with grammars when it is told so."""

    def launch(self, batch: Any, table: Any) -> HashResult:
        result = super().launch(batch, table)
        result.is_delayed = batch.has_grammars
        vars(result)["places"] = [request.row + 1 for request in batch.sampled_requests]
        return result

    def sample(self, result: HashResult, rows: np.ndarray, bits: np.ndarray) -> None:
        assert result.is_delayed, "this step has been sampled"
        result.is_delayed = False
        places = vars(result)["places"]

        def sampling() -> None:
            for row, mask in zip(rows.tolist(), bits, strict=True):
                flags = np.unpackbits(mask.view(np.uint8), bitorder="little")
                token = choose(result.tokens[row], np.flatnonzero(flags).tolist())
                result.tokens[row] = self.futures[places[row]] = token

        result.event = self.stream.launch(sampling, is_forward=False)


def with_fakes(engine: Any, at_once: bool = True) -> FakeCompiler:
    """Give an engine a `FakeCompiler`, and return it."""
    compiler = FakeCompiler(at_once=at_once)
    engine.core.scheduler.grammars.compiler = compiler
    engine.input_processor.no_structured_outputs = None
    return compiler
