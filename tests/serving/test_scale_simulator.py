"""The simulator: its cache, its clock, and what it says about policies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milestones.serving.scale.measure import WORKLOADS, run_simulated
from milestones.serving.scale.page import (
    PAGE,
    RESULTS,
    all_reduce_bytes,
    gpu_steps,
    sizing,
    with_tables,
)
from milestones.serving.scale.policy import POLICIES, make_policy
from milestones.serving.scale.simulated import PageCache, SimulatedReplica, SimulatedRequest
from milestones.serving.scale.simulation import Fleet, Simulation, point, simulate
from milestones.serving.scale.steps import (
    MEASURED,
    StepModel,
    interpolated,
    load_steps,
    measured_steps,
)
from milestones.serving.scale.traffic import Session, Traffic

STEPS = StepModel("made up", [(1, 0.01), (16, 0.02)], [(1, 0.01), (1001, 1.01)])


def request(keys: list[int], num_tokens: int, num_output: int = 16) -> SimulatedRequest:
    return SimulatedRequest(keys, keys, num_tokens, num_output, 0.0)


def test_a_request_alone_takes_its_steps() -> None:
    replica = SimulatedReplica("a", STEPS, 100, 16, 8)
    replica.add(alone := request([1, 2], 33, 11), 5.0)
    assert replica.next_event() == pytest.approx(5.0 + 0.042)
    assert replica.run_event(5.042) == [] and alone.first_token == 5.042
    assert replica.next_event() == pytest.approx(5.042 + 10 * 0.01)
    assert replica.run_event(5.142) == [alone] and replica.next_event() is None


def test_the_last_token_of_a_prompt_is_computed() -> None:
    """As in the engines: a prompt of whole pages that is cached hits all pages but the last one."""
    cache = PageCache(100)
    for tokens, hits in ((32, 0), (32, 1), (33, 2)):
        one = request([1, 2], tokens)
        assert cache.admit(one, 16)
        assert one.num_cached_pages == hits
        cache.finish(one)


OPERATIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=60)


@given(OPERATIONS)
def test_pages_are_conserved(operations: list[tuple[int, int, bool]]) -> None:
    """I3 for the simulator: free, private, locked and evictable pages are all pages."""
    cache, running = PageCache(12), list[SimulatedRequest]()
    for family, pages, ends in operations:
        one = request([family * 10 + i for i in range(pages)], pages * 16 + 1)
        if cache.admit(one, 16):
            running.append(one)
        if ends and running:
            cache.finish(running.pop(0))
        private = sum(request.private_pages for request in running)
        total = cache.num_free + private + len(cache._locks) + len(cache._evictable)
        assert total == 12 and cache.num_free >= 0
    for one in running:
        cache.finish(one)
    assert not cache._locks and cache.num_free + len(cache._evictable) == 12


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_every_load_is_zero(policy: str) -> None:
    run = Simulation(Fleet(3, load_steps(), 400, report_delay=0.5), make_policy(policy))
    done = run.run(Traffic(rate=0.5, num_systems=5).sessions(200))
    assert done.num_requests == 200 == len(done.ttft) == sum(done.sent.values())
    assert set(run.balancer.loads.values()) == {0}
    for replica in run.replicas.values():
        assert not replica.cache._locks, "I3: a lock is left"
        assert replica.cache.num_free + len(replica.cache._evictable) == 400


def test_reports_make_the_index_equal_to_the_caches() -> None:
    """Small caches, so that pages are evicted. Without a delay, the index has what is cached."""
    run = Simulation(Fleet(2, STEPS, 120), make_policy("prefix"))
    run.run(Traffic(rate=0.05, num_systems=5).sessions(100))
    for name, replica in run.replicas.items():
        assert run.balancer.index.keys(name) == {*replica.cache._evictable}
        assert replica.num_reports > 0


def test_the_simulator_repeats_itself() -> None:
    found = [point(STEPS, "prefix", 4, 50) for _ in range(2)]
    assert found[0] == found[1]


def test_affinity_keeps_its_hit_rate_when_replicas_are_added() -> None:
    few, many = (point(load_steps(), "prefix", n, 100).hit_rate for n in (4, 16))
    others = [point(load_steps(), "round-robin", n, 100).hit_rate for n in (4, 16)]
    assert abs(few - many) < 0.05 and others[1] < 0.75 * others[0] < 0.75 * few


def test_misses_of_round_robin_are_counted_by_hand() -> None:
    """Two prompts in turn, three replicas: each replica computes each prompt once."""
    sessions = [Session(i, [i % 2 * 10, i % 2 * 10 + 1], [(33, 2)], []) for i in range(30)]
    done = simulate(Fleet(3, STEPS, 100), make_policy("round-robin"), sessions)
    assert done.cached_tokens == (30 - 6) * 32 and done.prompt_tokens == 30 * 33
    done = simulate(Fleet(3, STEPS, 100), make_policy("prefix"), sessions)
    assert done.cached_tokens == (30 - 2) * 32


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_of_the_measurement(name: str) -> None:
    """They have no order by which round robin is as good as affinity."""
    work = WORKLOADS[name](250, 1)
    assert work == WORKLOADS[name](250, 1)
    rates = {p: run_simulated(work, p, 2, 512, load_steps()) for p in ("prefix", "round-robin")}
    assert rates["prefix"] > rates["round-robin"] + 0.04


def test_the_step_model_is_that_of_the_recorded_results() -> None:
    assert json.loads(MEASURED.read_text(encoding="utf-8")) == measured_steps()
    steps = load_steps()
    assert steps.decode_seconds(16) == steps.decode[4][1]
    assert steps.decode_seconds(1) == steps.decode_seconds(0) == steps.decode[0][1]
    assert interpolated([(1, 1.0), (3, 2.0)], 5) == 3.0, "beyond the last point, on the line"


def test_sizing_by_hand() -> None:
    found = sizing(STEPS, 0.5, running=16)
    assert found.seconds == pytest.approx(0.01 + 0.479 + 128 * 0.02 / 16)
    assert found.replicas(1000) == -(-1000 // (36 / found.seconds))
    assert sizing(gpu_steps(), 0.9, 64).seconds < sizing(gpu_steps(), 0.2, 64).seconds
    assert [all_reduce_bytes(4096, n) for n in (2, 4, 8)] == [16_384, 24_576, 28_672]


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "python -m milestones scale page"


def test_the_memory_of_a_rank_is_as_predicted() -> None:
    """SCALING.md predicts 63 % of the weights, and half of the keys and values."""
    found = json.loads((RESULTS / "scale_ranks.json").read_text(encoding="utf-8"))
    alone, divided = found["memory"]
    assert found["ranks"] == 2
    assert divided["weights"] / alone["weights"] == pytest.approx(0.63, abs=0.005)
    assert divided["kv_per_token"] * 2 == alone["kv_per_token"]


def test_the_simulator_agrees_with_the_measurement() -> None:
    """The recorded hit rates of real replicas, within 10 % of the simulated ones."""
    rows = json.loads((RESULTS / "scale_measured.json").read_text(encoding="utf-8"))["rows"]
    assert {row["replicas"] for row in rows} == {2, 4}
    for row in rows:
        assert row["hit_rate"] == pytest.approx(row["simulated"], rel=0.1), row
