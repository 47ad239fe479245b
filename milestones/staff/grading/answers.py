"""Compare the answers of graded code with those of the reference, in a process that has neither.

The questions of an exercise are a generator in `tests/questions`: it makes inputs from a random
number, calls what the student has written, and yields (kind, question, answer). The grader lets the
reference answer first. A kind is right if all its answers to all random numbers are. So the points
depend on what is wrong, and not on how many of the random numbers show it.

No process with graded code ever has the right answers, so it can say them only by computing them.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-3  # of floats; all other answers are exact
LONGEST = 300  # characters of an answer in a report
LONGEST_TEXT = 4000  # characters of any other text
Answer = list[Any]  # [kind, question, answer], as JSON has it


@dataclass(frozen=True)
class Questions:
    """The seed of an exercise, and the right answers to what is drawn from each derived seed."""

    seed: int = 0
    right: dict[int, list[Answer]] = field(default_factory=dict, repr=False)


@dataclass
class Answers:
    """The kinds of questions, each with its first wrong answer in words, or with no words."""

    kinds: dict[str, str] = field(default_factory=dict)
    right_answers: int = 0
    all_answers: int = 0

    @property
    def wrong(self) -> dict[str, str]:
        """The kinds with a wrong answer."""
        return {kind: fault for kind, fault in self.kinds.items() if fault}

    @property
    def share(self) -> float:
        """The share of the kinds without a wrong answer."""
        return 1 - len(self.wrong) / len(self.kinds) if self.kinds else 0.0


def seed_of(batch: int, exercise: str) -> int:
    """Return the seed of an exercise. It does not tell that of the batch."""
    return random.Random(f"{batch} {exercise}").getrandbits(48)


def seeds_of(seed: int, count: int) -> list[int]:
    """Return the seeds that an exercise asks questions with."""
    chance = random.Random(seed)
    return [chance.getrandbits(48) for _ in range(count)]


def right_answers(seed: int, texts: list[str], ended: str) -> tuple[Questions, list[str]]:
    """Return what the reference has said, and why it cannot be what is right."""
    given = _given(texts) or {-1: ([], ended)}
    faults = [
        f"seed {number}: {error or 'no question'}"
        for number, (answers, error) in given.items()
        if error or not answers
    ]
    return Questions(seed, {number: answers for number, (answers, _) in given.items()}), faults[:1]


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
    """Find the first wrong answer of each kind. `ended` says why answers may be missing."""
    answers, given = Answers(), _given(texts)
    for seed, right in questions.right.items():
        said, error = given.get(seed, given.get(-1, ([], ended)))
        for kind in dict.fromkeys(kind for kind, _, _ in right):
            faults = _faults([answer for answer in right if answer[0] == kind], said, error)
            is_last = kind == right[-1][0]
            fault = next(filter(None, faults), str(error) if error and is_last else "")
            answers.kinds[kind] = answers.kinds.get(kind) or readable(fault)
            answers.right_answers += faults.count("")
            answers.all_answers += len(faults)
    return answers


def _faults(right: list[Answer], said: Any, error: Any) -> list[str]:
    """Return for each right answer of one kind what is wrong in words, or nothing."""
    kind, faults = right[0][0], []
    said = said if isinstance(said, list) else []
    same_kind = [a for a in said if isinstance(a, list) and len(a) == 3 and a[0] == kind]
    for index, (_, question, expected) in enumerate(right):
        fault = ""
        try:
            if index >= len(same_kind):
                fault = f"{question}: {_shown(expected)} is expected; {error or 'no answer'}"
            elif not same(expected, got := same_kind[index][2]):
                fault = f"{question}: {_shown(expected)} is expected, not {_shown(got)}"
        except RecursionError:  # as deep as JSON can be read, and too deep to be written
            fault = "the answer is nested too deeply"
        faults.append(fault)
    return faults


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
