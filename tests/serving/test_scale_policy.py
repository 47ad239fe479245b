"""The router's policies and its index of prefixes, without replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milestones.serving.scale.balancer import Balancer, Ticket
from milestones.serving.scale.policy import (
    POLICIES,
    PrefixAffinity,
    RoundRobin,
    make_policy,
)
from milestones.serving.scale.prefix_index import (
    CHANGES_KEPT,
    CacheLog,
    CacheReport,
    PrefixIndex,
    page_keys,
)
from milestones.serving.scale.routing import UNREACHABLE_SECONDS, Routing
from milestones.serving.scale.wire import ForwardedCall

NAMES = ("a", "b", "c", "d")


def balancer(
    policy: str = "prefix", capacity: int = 100, names: tuple[str, ...] = NAMES
) -> Balancer:
    made = Balancer(make_policy(policy, seed=1))
    for name in names:
        made.add(name, capacity)
    return made


def sent(to: Balancer, keys: list[int], most_open: int | None = None) -> tuple[str, Ticket]:
    name = to.choose(keys, most_open=most_open)
    assert name is not None
    return name, to.send(name, keys)


def test_keys_name_a_page_and_all_before_it() -> None:
    first, second = page_keys([1, 2, 3, 4, 5], 2), page_keys([1, 2, 3, 9], 2)
    assert len(first) == len(second) == 2, "only whole pages have keys"
    assert first[0] == second[0] and first[1] != second[1]
    assert page_keys([3, 4], 2) != first[1:], "the same page after another prefix is another page"
    assert page_keys([3, 4], 2, parent=first[0]) == first[1:]
    assert page_keys([2**31], 1) == page_keys([2**31], 1)


PATHS = st.lists(st.integers(0, 2), max_size=5).map(lambda ids: page_keys(ids, 1))
STEPS = st.lists(
    st.tuples(st.sampled_from(["insert", "evict", "restart"]), st.sampled_from("ab"), PATHS),
    max_size=40,
)


@given(STEPS, st.integers(1, 6))
def test_the_index_is_bounded_and_consistent(
    steps: list[tuple[str, str, list[int]]], capacity: int
) -> None:
    """The reference is a plain set of pages for each replica, which never evicts."""
    index, sets = PrefixIndex(), {name: set[int]() for name in "ab"}
    for name in "ab":
        index.add(name, capacity)
    for action, name, keys in steps:
        if action == "insert":
            index.insert(name, keys)
            sets[name] |= {*keys}
            assert index.matches(keys).get(name, 0) == min(len(keys), capacity)
        elif action == "evict":
            index.evict(name, keys)
            sets[name] -= {*keys}
        else:
            index.add(name, capacity)
            sets[name].clear()
        index.check_invariants()
        for replica in "ab":
            assert index.keys(replica) <= sets[replica]
            held = index.keys(replica)
            expected = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            assert index.matches(keys).get(replica, 0) == expected


def test_the_index_evicts_the_end_of_the_oldest_prefix() -> None:
    index = PrefixIndex()
    index.add("a", 4)
    old, new = page_keys([1, 2, 3], 1), page_keys([7, 8], 1)
    index.insert("a", old)
    index.insert("a", new)
    assert index.matches(old) == {"a": 2} and index.matches(new) == {"a": 2}
    index.insert("a", old)
    assert index.matches(old) == {"a": 3} and index.matches(new) == {"a": 1}


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), PATHS), max_size=60),
    st.sampled_from(POLICIES),
)
def test_a_load_falls_by_one_on_every_exit(
    steps: list[tuple[bool, int, list[int]]], policy: str
) -> None:
    """Tickets are closed in any order and twice; replicas restart while requests are open."""
    router, open_tickets = balancer(policy), list[tuple[str, Ticket]]()
    loads = Counter[str]()
    for is_send, number, keys in steps:
        if is_send or not open_tickets:
            name, ticket = sent(router, keys)
            open_tickets.append((name, ticket))
            loads[name] += 1
        else:
            name, ticket = open_tickets.pop(number % len(open_tickets))
            ticket.close()
            ticket.close()
            loads[name] -= 1
        if number == 9:
            router.remove("b")
            router.add("b", 5)
            loads["b"] = 0
            for name, ticket in open_tickets:  # their replica is gone: they must change nothing
                if name == "b":
                    ticket.close()
            open_tickets = [pair for pair in open_tickets if pair[0] != "b"]
        assert router.loads == {name: loads[name] for name in NAMES}
    for _, ticket in open_tickets:
        ticket.close()
    assert set(router.loads.values()) == {0}


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6), st.lists(st.integers(0, 10), max_size=6)
)
def test_affinity_takes_the_longest_match_below_its_limit(
    loads: list[int], pages: list[int]
) -> None:
    policy = PrefixAffinity(seed=3)
    by_name = {str(i): load for i, load in enumerate(loads)}
    matches = {str(i): n for i, n in enumerate(pages[: len(loads)]) if n}
    chosen, limit = policy.choose(by_name, matches, 10), policy.limit(by_name)
    assert min(loads) <= limit, "some replica is always eligible"
    useful = {n: m for n, m in matches.items() if by_name[n] <= limit}
    if useful:
        assert matches[chosen] == max(useful.values()) and by_name[chosen] <= limit
    else:
        assert len(loads) == 1 or by_name[chosen] < max(loads) or loads.count(max(loads)) > 1


def test_a_hot_prefix_spreads_when_its_replica_is_busy() -> None:
    """Requests stay open. The prefix moves on to another replica before the first one is full."""
    router, keys = balancer(), page_keys(range(10), 1)
    first, _ = sent(router, keys)
    for i in range(1, 200):
        assert max(router.loads.values()) <= 1.25 * i / len(NAMES) + 2 + 1
        sent(router, keys)
        if i == 40:
            assert sorted(router.loads.values())[1] > 0, "three of four replicas have the prefix"
    assert min(router.loads.values()) >= 30 and router.loads[first] >= 40


def test_a_full_replica_gets_nothing() -> None:
    router, keys = balancer(), page_keys(range(10), 1)
    first, _ = sent(router, keys, most_open=1)
    others = [sent(router, keys, most_open=1)[0] for _ in range(3)]
    assert {first, *others} == set(NAMES)
    assert sent(router, keys, most_open=1)[0] in NAMES, "if all are full, one must queue it"


@pytest.mark.parametrize("policy", POLICIES)
def test_new_requests_spread_when_all_counts_are_equal(policy: str) -> None:
    """One after the other, so that all loads are 0. Only their first page is the same, as with a
    chat template: it draws nothing.
    """
    router, chosen = balancer(policy), Counter[str]()
    for i in range(400):
        name, ticket = sent(router, page_keys([1, *range(100 * i, 100 * i + 30)], 1))
        ticket.close()
        chosen[name] += 1
    assert set(chosen) == set(NAMES) and max(chosen.values()) < 140


def test_a_restarted_replica_does_not_get_all_new_requests() -> None:
    """It is the idlest one and has the emptiest tree; a third of the requests is its bound here."""
    router, chosen = balancer(names=(*NAMES, "e", "f")), Counter[str]()
    for name in router.names:
        for i in range(20):
            router.send(name, page_keys([i], 1))
    router.remove("c")
    router.add("c", 100)
    for i in range(30):
        chosen[str(router.choose(page_keys([1000 + i], 1)))] += 1
    assert 0 < chosen["c"] < 20
    assert router.choose(page_keys([3], 1)) != "c", "the others keep their affinity"


def call_of(number: int, *ids: int) -> ForwardedCall:
    keys = tuple(page_keys(ids, 1))
    return ForwardedCall(number, "POST", "/v1/completions", b"", (), b"", keys)


def routing_to(*names: str) -> Routing:
    made = Routing("prefix", most_open=1)
    made.update(names)
    return made


def test_a_call_that_asks_again_counts_once() -> None:
    """Ray asks again while the replica is full, and after the replica has refused the call."""
    routing, call = routing_to("a", "b"), call_of(1, 5)
    chosen = []
    routing.open(1)
    for _ in range(5):
        chosen.append(routing.choose(call, ["a", "b"]))
        assert sorted(routing.balancer.loads.values()) == [0, 1]
    assert routing.close(1) == chosen[-1] and routing.close(1) is None
    assert routing.balancer.loads == {"a": 0, "b": 0}


def test_a_call_that_has_ended_takes_no_place() -> None:
    """Its client has gone away, but the thread of the router is just choosing a replica for it."""
    routing, call = routing_to("a"), call_of(1, 5)
    routing.open(1)
    assert routing.choose(call, ["a"]) == "a"
    routing.close(1)
    assert routing.choose(call, ["a"]) is None
    assert routing.balancer.loads == {"a": 0}, "this load would never fall"
    routing.open(1)  # the same call is sent again
    assert routing.choose(call, ["a"]) == "a"


def test_a_dead_replica_that_is_still_listed_does_not_come_back() -> None:
    """Ray lists it for some seconds. Its successor has another name and an empty cache."""
    routing, call = routing_to("a", "b"), call_of(1, *range(9))
    routing.open(1)
    dead = routing.choose(call, ["a", "b"])
    routing.died(dead)
    routing.update(["a", "b", "c"])
    alive = {"a", "b", "c"} - {dead}
    assert {*routing.balancer.names} == alive
    assert not routing.balancer.index.matches(call.keys)
    assert routing.choose(call, ["a", "b", "c"]) in alive
    routing.close(1)
    assert {*routing.balancer.loads.values()} == {0}


def test_a_replica_that_could_not_be_reached_comes_back() -> None:
    """The network was at fault, and Ray still lists the replica. Its cache may have changed."""
    now = 100.0
    routing, call = Routing("prefix", most_open=1, clock=lambda: now), call_of(1, *range(9))
    routing.update(["a", "b"])
    routing.open(1)
    lost = routing.choose(call, ["a", "b"])
    routing.unreachable(lost)
    assert routing.choose(call, ["a", "b"]) != lost and lost not in routing.balancer.names
    now += UNREACHABLE_SECONDS
    assert routing.choose(call, [lost or ""]) == lost
    assert routing.balancer.index.matches(call.keys).keys() == {"a", "b"}
    routing.died(lost)
    now += 2 * UNREACHABLE_SECONDS
    routing.unreachable(lost)
    routing.update(["a", "b"])
    assert lost not in routing.balancer.names, "it is dead, and this stays so"


def test_a_replica_that_is_removed_with_an_open_call() -> None:
    """It is drained: it gets no new calls, and the end of the open one changes no other load."""
    routing = routing_to("a")
    routing.open(1)
    assert routing.choose(call_of(1, 5), ["a"]) == "a"
    routing.update(["b"])
    routing.open(2)
    assert routing.choose(call_of(2, 5), ["a", "b"]) == "b"
    routing.close(1)
    assert routing.balancer.loads == {"b": 1}


def test_round_robin_takes_turns_while_replicas_come_and_go() -> None:
    policy = RoundRobin()
    loads = dict.fromkeys(NAMES, 0)
    assert [policy.choose(loads, {}, 0) for _ in range(4)] == ["b", "c", "d", "a"]
    del loads["b"]
    assert {policy.choose(loads, {}, 0) for _ in range(3)} == {*loads}


STATES = st.lists(st.sets(st.integers(0, 8)).map(sorted), min_size=1, max_size=2 * CHANGES_KEPT)


@given(STATES, st.data())
def test_reports_bring_a_router_up_to_date(states: list[list[int]], data: st.DataObject) -> None:
    """Whichever reports arrive, and in whatever order, the newest one decides."""
    log, router, late = CacheLog(), balancer(names=("a",)), list[CacheReport]()
    for state in states:
        log.update(state)
        arrives = data.draw(st.sampled_from(["lost", "now", "late"]))
        report = log.since(router.reported()["a"])
        if arrives == "late":
            late.append(report)
        elif arrives == "now":
            router.report("a", report)
            for old in late:
                router.report("a", old)
            assert router.index.keys("a") == {*state} and router.reported()["a"] == log.number
    router.report("a", log.since(router.reported()["a"]))
    assert router.index.keys("a") == {*states[-1]}
    router.index.check_invariants()


def test_a_report_corrects_what_the_router_only_believed() -> None:
    router, keys = balancer(names=("a",)), page_keys(range(4), 1)
    router.send("a", keys)
    log = CacheLog()
    log.update(keys)
    log.update(keys[:2])
    router.report("a", log.since(0))
    assert router.index.matches(keys) == {"a": 2}
    router.report("gone", log.since(0))


def test_a_router_far_behind_gets_the_whole_state() -> None:
    log = CacheLog()
    for key in range(CHANGES_KEPT + 2):
        log.update([key])
    assert log.since(0) == CacheReport(log.number, None, (CHANGES_KEPT + 1,))
    assert log.since(log.number + 5).after is None, "the router knew another life of this replica"
    assert log.since(log.number) == CacheReport(log.number, log.number, ())


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy must be one of"):
        make_policy("sticky")
