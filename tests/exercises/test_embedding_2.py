"""embedding.2: a pooling request ends with its prompt, and uses no page that it cannot use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common import PoolingParams
from common.engine_core import EngineCoreOutput
from milestones.electives.embedding import engine as engine_module
from milestones.electives.embedding.in_flight import continuing
from milestones.electives.embedding.kv_cache import KVCacheManager
from milestones.electives.embedding.pooling_request import PoolingRequest
from milestones.electives.embedding.schedule_batch import ScheduleBatch
from milestones.lab.instruments.streams import LateStream
from tests.exercises.by_hand import make_request
from tests.exercises.test_embedding_1 import pooling_request
from tests.helpers.fake_overlap import expected_states, hash_engine
from tests.helpers.oracle import drain, greedy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def planned(kind: Any, computed: int, count: int) -> tuple[list[int], list[int]]:
    """Plan `count` tokens of a pooling request between two texts. Return both lists of indices."""
    batch = ScheduleBatch()
    request = pooling_request("p", PROMPT, kind)
    request.num_computed_tokens = computed
    batch.add(make_request("a", [1]), 1)
    batch.add(request, count)
    batch.add(make_request("b", [1, 2, 3]), 3)
    return batch.pooled_indices, batch.sampled_indices


def test_a_mean_needs_every_chunk() -> None:
    found = [planned("MEAN", 0, 3), planned("MEAN", 3, 3), planned("MEAN", 6, 2)]
    assert found == [([1], [0, 2])] * 3, "it is pooled in each step, and never sampled"


def test_the_last_token_is_in_the_last_chunk() -> None:
    found = [planned("LAST", 0, 3), planned("LAST", 3, 3), planned("LAST", 6, 2)]
    assert found == [([], [0, 2]), ([], [0, 2]), ([1], [0, 2])], (
        "of three chunks, LAST needs the hidden states of the third: (pooled, sampled) indices"
    )


def test_a_step_that_pools_is_no_decode() -> None:
    """I1: one token of each request, but not each of them gets a next token."""
    batch = ScheduleBatch()
    batch.add(make_request("a", [1]), 1)
    assert batch.is_decode
    batch.add(pooling_request("p", [7], "LAST"), 1)
    assert not batch.is_decode, "a graph has no hidden states"


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_it_goes_on_until_its_prompt_is_computed(kind: Any) -> None:
    text, between, done = (make_request("text", [1, 2]), *(
        pooling_request(name, PROMPT, kind) for name in ("between", "done")
    ))  # fmt: skip
    between.num_computed_tokens, done.num_computed_tokens = 7, 8
    found = [request.request_id for request in continuing([text, between, done])]
    assert found == ["text", "between"], "no token follows"


def test_a_mean_uses_no_cached_page() -> None:
    """I1: a cached page has keys and values, and no hidden states."""
    cache = KVCacheManager(4, 16, 2)
    first = pooling_request("first", PROMPT, "MEAN")
    cache.allocate(first)
    cache.allocate_slots(first, 8)
    first.num_computed_tokens = 8
    cache.free(first)
    found = {}
    for kind in ("LAST", "MEAN"):
        again = pooling_request(kind, PROMPT, kind)
        found[kind] = cache.find_prefix(again).num_pages
        cache.allocate(again)
        assert again.num_computed_tokens == 2 * found[kind]
    assert found == {"LAST": 3, "MEAN": 0}, "LAST computes its last token, MEAN all of them"


def made(budget: int = 3) -> Any:
    """Return an engine on hashes that computes that many tokens in a step."""
    return hash_engine(
        engine_module, LateStream(), 40, page_size=2, max_num_seqs=3, max_num_batched_tokens=budget
    )


def expected(kind: str) -> list[float]:
    states = expected_states(PROMPT)
    found: list[float] = (states[-1] if kind == "LAST" else states.sum(dim=0) / 8).tolist()
    return found


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_one_vector_after_the_last_chunk(kind: Any) -> None:
    """I3: in that step its row and its pages are given back."""
    engine = made()
    engine.add_request(PROMPT, PoolingParams(kind, normalize=False), "p")
    outputs = [engine.step() for _ in range(3)]
    assert [len(found) for found in outputs] == [0, 0, 1], "eight tokens in chunks of three"
    (output,) = outputs[2]
    data = output.outputs.data
    assert (data.tolist(), output.finished) == (expected(kind), True)
    assert not engine.core.scheduler.running, "I3: it ends in this step"
    assert engine.stats().kv_tokens_reserved == 0, "I3: its pages are free, or in the tree alone"


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_texts_beside_it_get_their_tokens(kind: Any) -> None:
    engine = made(budget=16)
    engine.add_request([7, 8], greedy(3, ignore_eos=True), "text")
    engine.add_request(PROMPT, PoolingParams(kind, normalize=False), "p")
    finals = {name: outputs[-1] for name, outputs in drain(engine).items()}
    assert finals["p"].outputs.data.tolist() == expected(kind)  # type: ignore[attr-defined]
    assert len(finals["text"].outputs[0].token_ids) == 3


def test_a_vector_that_is_not_finite_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`finish_pooling` says why a request ends: the scheduler must note the same reason."""

    def finish(request: PoolingRequest) -> EngineCoreOutput:
        return EngineCoreOutput(request, finish_reason="error", error="not finite")

    monkeypatch.setattr(engine_module, "finish_pooling", finish)
    engine = made(budget=16)
    engine.add_request(PROMPT, PoolingParams("LAST"), "p")
    engine.core.launch()
    (request,) = engine.core.scheduler.running
    drain(engine)
    assert request.finish_reason == "error", "I4: the output of finish_pooling has this reason"


def test_an_aborted_request_gets_no_vector() -> None:
    """Its step is in flight when it is aborted. Another request keeps the step alive."""
    engine = made(budget=16)
    for name in ("p", "q"):
        engine.add_request([*PROMPT, ord(name) % 50], PoolingParams("MEAN", normalize=False), name)
    engine.core.launch()
    aborted = engine.core.scheduler.running[0]
    assert engine.abort_request("p")
    finals = drain(engine)
    assert aborted.partial_sum is None, (
        "p was aborted before its step had ended: update_pooled must skip it"
    )
    assert [len(outputs) for outputs in finals.values()] == [1, 1], "each request ends once"
    assert finals["p"][0].outputs.data is None  # type: ignore[attr-defined]
    assert isinstance(finals["q"][0].outputs.data, torch.Tensor)  # type: ignore[attr-defined]
