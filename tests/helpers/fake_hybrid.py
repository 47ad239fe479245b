"""An engine with groups of layers and without tensors: the idea is that of `fake_overlap`.

The value of a position in a group is a hash of the token, and of all values of the group that its
query sees. All groups store their values in one memory, as in the engine. The next token is a hash
of the values that the last query sees in each group. Therefore a page that is given back too early,
a stale page, or a prefix that a group cannot resume from changes the tokens.

The state of a group with states is a hash of the state before it and of the token. So a state of
another request or position changes the tokens, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from milestones.electives.hybrid_memory.kv_groups import KVCacheGroupSpec
from milestones.lab.instruments.streams import LateStream
from tests.helpers.fake_overlap import HashResult, HashRunner, hash_engine, text_of
from tests.helpers.fake_paged import VOCAB_SIZE

Groups = Sequence[KVCacheGroupSpec]


def groups_of(*windows: int, has_full: bool = True, num_snapshots: int | None = None) -> Groups:
    """Return a group of one layer with full attention, or none, and a group for each window.

    num_snapshots: add a group with states and that many snapshots.
    """
    groups = [KVCacheGroupSpec((0,) if has_full else ())]
    groups += [KVCacheGroupSpec((n,), window) for n, window in enumerate(windows, 1)]
    if num_snapshots is not None:
        groups.append(KVCacheGroupSpec((len(groups),), num_snapshots=num_snapshots))
    return groups


def first_seen(group: KVCacheGroupSpec, position: int) -> int:
    """Return the first position that the query at `position` sees. A state: the one before it."""
    if group.num_snapshots is not None:
        return max(0, position - 1)
    return 0 if group.window is None else max(0, position - group.window + 1)


def value_of(number: int, seen: Sequence[int], token: int, position: int) -> int:
    return hash((number, tuple(seen), token, position))


def expected_output(
    groups: Groups, prompt: list[int], max_tokens: int, stops: Sequence[int] = (), stop: str = ""
) -> list[int]:
    """Return the expected answer up to its first stop, computed from the token list alone."""
    tokens, values, output = list(prompt), [list[int]() for _ in groups], list[int]()
    while len(output) < max_tokens:
        for number, group in enumerate(groups):
            for position in range(len(values[number]), len(tokens)):
                seen = values[number][first_seen(group, position) :]
                value = value_of(number, seen, tokens[position], position)
                values[number].append(value)
        seen_last = [
            tuple(values[number][first_seen(group, len(tokens) - 1) :])
            for number, group in enumerate(groups)
            if group.layers
        ]
        output.append(hash(tuple(seen_last)) % VOCAB_SIZE)
        tokens.append(output[-1])
        if output[-1] in stops or (stop and stop in text_of(output)):
            break
    return output


class HybridRunner(HashRunner):
    """Computes the values of all groups through their rows of the page table."""

    def __init__(self, num_pages: int, page_size: int, stream: LateStream) -> None:
        super().__init__(num_pages, page_size, stream)
        self.num_rows = 0
        self.row_states: dict[int, int | None] = {}  # of the group with states, by row
        self.snapshots: dict[int, int | None] = {}
        self.failing: set[int] = set()  # the numbers of launches that fail in their middle
        self.is_searching: Callable[[], bool] = bool  # then none fails: that would end a request

    def launch(self, batch: Any, table: Any) -> HashResult:
        """Take the rows as they are now. The stream decides when they are used."""
        self.num_launches += 1
        for row, column, page in table.take_updates():
            self.rows.setdefault(row, {})[column] = page
        states = table.allocator.states
        copies = states[0].take_copies() if states else ([], [])
        parts = []
        for i, (request, n) in enumerate(
            zip(batch.requests, batch.num_scheduled_tokens, strict=True)
        ):
            assert request.num_tokens < request.max_num_tokens, "this request is known to end"
            start = request.num_computed_tokens
            rows = [n * self.num_rows + request.row for n in range(len(self.kv_pool.groups))]
            pages = [dict(self.rows.get(row, {})) for row in rows]
            tokens = list(request.token_ids[start : start + n])
            parts.append((request.row + 1, pages, start, tokens, i in batch.sampled_indices))
        result = HashResult([])

        fails = self.num_launches in self.failing and not self.is_searching()

        def work() -> None:
            for row, snapshot in copies[0]:
                self.row_states[row + 1] = None if snapshot is None else self.snapshots[snapshot]
            self._compute_parts(parts[:1] if fails else parts, result)
            if fails:
                raise RuntimeError("a step that fails when it has computed one request")
            for row, snapshot in copies[1]:
                self.snapshots[snapshot] = self.row_states[row + 1]

        result.event = self.stream.launch(work)
        return result

    @property
    def groups(self) -> Groups:
        return [*self.kv_pool.groups, *self.states.groups]

    def _compute_parts(self, parts: list[Any], result: HashResult) -> None:
        for row, pages, start, tokens, is_sampled in parts:
            tokens = [self.futures[-t] if t < 0 else t for t in tokens]
            seen_last = []
            for number, group in enumerate(self.groups):
                if not group.layers:
                    continue
                if group.num_snapshots is not None:
                    for position, token in enumerate(tokens, start):
                        state = self.row_states[row]
                        seen = [] if state is None else [state]
                        seen.append(value_of(number, seen, token, position))
                        self.row_states[row] = seen[-1]
                    seen_last.append(tuple(seen))
                    continue
                for position, token in enumerate(tokens, start):
                    places = range(first_seen(group, position), position)
                    seen = [self.memory[self._place(pages[number], p)] for p in places]
                    place = self._place(pages[number], position)
                    assert place // self.page_size not in self.free_pages, "I3: a free page"
                    self.memory[place] = value_of(number, seen, token, position)
                    seen.append(self.memory[place])
                seen_last.append(tuple(seen))
            if is_sampled:
                result.tokens.append(hash(tuple(seen_last)) % VOCAB_SIZE)
                self.futures[row] = result.tokens[-1]

    def _place(self, pages: dict[int, int], position: int) -> int:
        page = pages.get(position // self.page_size, 0)
        assert page != 0, f"I1: the page of position {position} was given back"
        return page * self.page_size + position % self.page_size


def hybrid_engine(
    module: Any, stream: LateStream, num_pages: int, groups: Groups, **config: Any
) -> Any:
    """Return an engine with these groups on a fake runner, audited after every step."""

    def runner(num_pages: int, page_size: int, stream: LateStream) -> HybridRunner:
        made = HybridRunner(num_pages, page_size, stream)
        made.kv_pool.groups = [group for group in groups if group.num_snapshots is None]
        made.states.groups = [group for group in groups if group.num_snapshots is not None]
        return made

    engine = hash_engine(module, stream, num_pages, runner, **config)  # type: ignore[arg-type]
    engine.core.runner.num_rows = engine.core.scheduler.kv_cache.table.num_rows
    return engine
