"""The record of decisions: it agrees with the counters, and the log is the same record."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from common.tracing.decisions import Decision, watch
from common.tracing.forced_retractions import apply_options
from tests.conftest import EngineFactory
from tests.helpers.oracle import drain, greedy

STEM = [7] * 24  # the pages that all prompts share


def decided(engine: Any, *, num_requests: int = 5, max_tokens: int = 30) -> list[Decision]:
    """Run requests with a common stem. Return what the engine decides."""
    decisions: list[Decision] = []
    with ExitStack() as undo:
        watch(engine.core, decisions.append, undo)
        for i in range(num_requests):
            engine.add_request([*STEM, *[i] * 5], greedy(max_tokens, ignore_eos=True))
        drain(engine)
    return decisions


@pytest.mark.since("m2_continuous")
def test_every_admission_is_recorded(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(max_num_seqs=2)
    admitted = [d.request.request_id for d in decided(engine) if d.kind == "admit" and d.request]
    assert admitted == [f"request-{i}" for i in range(5)]
    scheduler = engine.core.scheduler
    assert "schedule" not in vars(scheduler) and "allocate" not in vars(scheduler.kv_cache)


@pytest.mark.since("m3_paged")
@pytest.mark.before("disaggregated")  # its decode side has room for a token of each request
def test_the_reason_to_wait(make_engine: EngineFactory) -> None:
    """Rows, the tokens of a step, and memory are short in turn."""
    reasons = {
        "no row": {"max_num_seqs": 2},
        "no tokens left in the step": {"max_num_batched_tokens": 16},
        "no memory": {"num_pages": 24, "page_size": 4},
    }
    for reason, config in reasons.items():
        engine: Any = make_engine(**{"num_pages": 200, "page_size": 4, **config})
        assert reason in {d.reason for d in decided(engine) if d.kind == "wait"}, config


@pytest.mark.since("m4_radix")
@pytest.mark.before("embedding")
def test_a_request_waits_for_a_prefix(make_engine: EngineFactory) -> None:
    waits = [d.reason for d in decided(make_engine(page_size=4, num_pages=200)) if d.kind == "wait"]
    assert "a running request computes its prefix" in waits


@pytest.mark.since("m3_paged")
def test_retractions_agree_with_the_counter(make_engine: EngineFactory) -> None:
    engine: Any = make_engine(page_size=4, num_pages=26, max_num_seqs=4)
    engine.core.scheduler.admission.new_token_ratio = 0.1
    kinds = Counter(decision.kind for decision in decided(engine, max_tokens=40))
    assert kinds["retract"] == engine.stats().num_retractions > 0


@pytest.mark.since("m4_radix")
def test_evictions_and_splits(make_engine: EngineFactory) -> None:
    """The second prompts split the node of the first one, and the third ones need its pages."""
    engine: Any = make_engine(page_size=4, num_pages=40, max_num_seqs=2)
    kinds = Counter[str]()
    for prompt in ([1] * 40, [1] * 20 + [2] * 20, [3] * 60, [4] * 60):
        with ExitStack() as undo:
            watch(engine.core, lambda d: kinds.update({d.kind: d.count}), undo)
            engine.add_request(prompt, greedy(4, ignore_eos=True))
            drain(engine)
    assert kinds["split"] == 5, "the first 20 tokens are common"
    assert kinds["evict"] > 0 and kinds["admit"] == 20


@pytest.mark.since("m3_paged")
def test_decisions_are_logged(make_engine: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    """Operators look for such a line: which request loses how many pages, and the new ratio."""
    engine: Any = make_engine(page_size=4, num_pages=26, max_num_seqs=4)
    engine.core.scheduler.admission.new_token_ratio = 0.1
    apply_options(argparse.Namespace(log_level="info", retract_every=None), engine)
    with caplog.at_level("INFO"):
        decided(engine, max_tokens=40)
    logged = [line for line in caplog.messages if line.startswith("retract ")]
    assert len(logged) == engine.stats().num_retractions > 0
    said = r"retract request-\d, which holds \d+ pages?; new_token_ratio 0\.\d+ -> \d\.\d+"
    assert re.fullmatch(said + ", because the KV cache pool is full", logged[0])
    assert "admit request-0, cached tokens: 0" in caplog.messages
    waits = [line for line in caplog.messages if line.startswith("no more")]
    assert all(a != b for a, b in pairwise(waits)), "a reason is not repeated"
