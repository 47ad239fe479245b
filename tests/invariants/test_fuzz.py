"""Random schedules on the hash model: a wrong slot, mask or position changes the answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milestones.lab.instruments.hash_model import expected_tokens, hash_model
from tests.conftest import build_engine, schedules
from tests.helpers.oracle import greedy
from tests.helpers.random_schedule import run_schedule
from tests.helpers.replaced import plant

pytestmark = pytest.mark.streams

FAKE = hash_model()
STEMS: tuple[list[int], ...] = ([], [7] * 16, [7] * 9 + [8] * 8)  # prompts may share a beginning


def test_the_hash_model_agrees_with_its_definition() -> None:
    engine = build_engine("m1_single", FAKE)
    output = engine.generate([[5, 6, 7]], greedy(12, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == expected_tokens([5, 6, 7], 12)
    assert len(set(output.outputs[0].token_ids)) > 8


@settings(max_examples=schedules(60))
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), budget=st.sampled_from([24, 50, 2048]))
def test_random_schedules(milestone: str, seed: int, rows: int, budget: int) -> None:
    """Arrivals, lengths, shared prefixes and aborts are random. Answers are exact to the token."""
    chance = random.Random(seed)
    engine = build_engine(
        milestone, FAKE, max_num_seqs=rows, max_num_batched_tokens=budget,
        page_size=chance.choice([1, 4, 16]), num_pages=chance.choice([None, 60]),
        attention_backend=chance.choice(["auto", "torch"]),
    )  # fmt: skip

    def add() -> tuple[str, list[int]]:
        length = chance.choice([1, 2, 5, 16, 17, 24])
        tail = [chance.randrange(250) for _ in range(24)]
        prompt, max_tokens = (
            [*chance.choice(STEMS), *tail][:length],
            chance.choice([1, 2, 3, 8, 20]),
        )
        name = engine.add_request(prompt, greedy(max_tokens, ignore_eos=True))
        return name, expected_tokens(prompt, max_tokens)

    run_schedule(engine, chance, add, chance.randint(1, 14), arrivals=0.5, aborts=0.1)


@pytest.mark.since("m2_continuous")
@pytest.mark.before("m3_paged")
def test_the_hash_model_sees_a_wrong_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model can fail: it notices when a row is moved with one token too few."""

    def one_token_too_few(move: Any, self: Any, row_move: Any) -> None:
        move(self, row_move._replace(num_tokens=row_move.num_tokens - 1))

    plant(monkeypatch, "m2_continuous.kv_pool.KVPool.move", one_token_too_few)
    engine = build_engine("m2_continuous", FAKE)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    outputs = engine.generate(prompts, [greedy(n, ignore_eos=True) for n in (2, 9, 9)])
    answers = [o.outputs[0].token_ids for o in outputs]
    assert answers != [expected_tokens(p, n) for p, n in zip(prompts, (2, 9, 9), strict=True)]
