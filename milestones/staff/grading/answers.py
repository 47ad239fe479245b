"""Compare the answers of graded code with those of the reference, in a process that has neither.

The questions of an exercise are a generator in `tests/questions`: it makes inputs from a random
number, calls what the student has written, and yields pairs (question, answer). The grader draws
the random numbers anew for each run, and lets the reference answer first. No process with graded
code ever has the right answers, so it can say them only by computing them.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field
from typing import Any

NUM_SEEDS = 12  # for each exercise
TOLERANCE = 1e-3  # of floats; all other answers are exact
LONGEST = 300  # characters of an answer in a report
LONGEST_TEXT = 4000  # characters of any other text


@dataclass(frozen=True)
class Questions:
    """Random numbers, and the right answers to the questions that are made from each of them."""

    seeds: tuple[int, ...] = ()
    right: dict[int, list[list[Any]]] = field(default_factory=dict, repr=False)


@dataclass
class Answers:
    """How many seeds were answered rightly, and what was wrong first."""

    right: int = 0
    asked: int = 0
    wrong: str = ""


def draw_seeds() -> tuple[int, ...]:
    """Return new random numbers. They must not be known before the submission is closed."""
    return tuple(secrets.randbits(48) for _ in range(NUM_SEEDS))


def right_answers(
    seeds: tuple[int, ...], texts: list[str], ended: str
) -> tuple[Questions, list[str]]:
    """Return what the reference has said, and why it cannot be what is right."""
    given = _given(texts)
    answers = {seed: given.get(seed, given.get(-1, ([], ended))) for seed in seeds}
    faults = [
        f"seed {seed}: {error or 'no question'}"
        for seed, (pairs, error) in answers.items()
        if error or not pairs
    ]
    return Questions(seeds, {seed: pairs for seed, (pairs, _) in answers.items()}), faults[:1]


def _given(texts: list[str]) -> dict[int, tuple[Any, Any]]:
    """Return the answers and the error of each seed. Those of seed -1 hold for all others."""
    given: dict[int, tuple[Any, Any]] = {}
    for text in texts:
        try:
            seed, pairs, error = json.loads(text)
            given.setdefault(int(seed), (pairs, error))
        except (ValueError, TypeError, OverflowError, RecursionError):
            continue  # graded code said this, and not the process that asks it
    return given


def compare(questions: Questions, texts: list[str], ended: str) -> Answers:
    """Count the seeds with right answers only. `ended` says why answers may be missing."""
    answers, given = Answers(asked=len(questions.seeds)), _given(texts)
    for seed in questions.seeds:
        try:
            fault = _fault(questions.right[seed], *given.get(seed, given.get(-1, ([], ended))))
        except RecursionError:  # as deep as JSON can be read, and too deep to be written
            fault = "the answer is nested too deeply"
        answers.right += not fault
        answers.wrong = answers.wrong or readable(fault)
    return answers


def _fault(right: list[list[Any]], pairs: Any, error: Any) -> str:
    """Return the first difference in words, or nothing if all answers are right."""
    pairs = pairs if isinstance(pairs, list) else []
    for index, (question, expected) in enumerate(right):
        if index >= len(pairs):
            return f"{question}: {_shown(expected)} is expected; {error or 'no answer'}"
        pair = pairs[index]
        got = pair[1] if isinstance(pair, list) and len(pair) == 2 else None
        if not same(expected, got):
            return f"{question}: {_shown(expected)} is expected, not {_shown(got)}"
    return str(error) if error else ""


def same(expected: Any, got: Any) -> bool:
    """Return whether two values of JSON are equal, as `==` of Python compares them: a number may
    have another type, so that 3.0 and True are 3 and 1. Floats may differ by rounding."""
    both_numbers = isinstance(expected, (int, float)) and isinstance(got, (int, float))
    if isinstance(expected, float) and both_numbers:
        return _close(expected, got)
    if type(expected) is not type(got) and not both_numbers:
        return False
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(same(expected[k], got[k]) for k in expected)
    return bool(expected == got)


def _close(expected: float, got: float) -> bool:
    try:
        close = math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return close or (math.isnan(expected) and math.isnan(got))
    except OverflowError:  # an integer that no float can hold
        return False


def readable(text: str) -> str:
    """Return a text of graded code that is not too long and can be written to a file."""
    half = LONGEST_TEXT // 2
    text = text if len(text) <= LONGEST_TEXT else f"{text[:half]} ... {text[-half:]}"
    return escaped(text, kept="\n\t")


def escaped(text: str, kept: str = "") -> str:
    """Return a text in which a character that cannot be printed is an escape sequence.

    Otherwise, graded code could write on the screen of the person who runs the grader.
    """
    signs = (c if c.isprintable() or c in kept else _escape(c) for c in text)
    return "".join(signs)


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
