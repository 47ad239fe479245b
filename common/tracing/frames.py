"""`Observer`: reads the state of an engine between its steps and records what has changed.

It reads what all engines have in common (queues, requests, counters), and in addition what it
finds: pages from the third milestone on, the radix tree from the fourth. It calls only methods
without side effects. For example, `match_prefix` would split nodes, and `take_updates` would take
updates away from the model runner.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import count
from typing import Any

from ..request import Request
from .data import TREE, Frame, PageOwner, RequestInfo, State

PROMPT_TOKENS = 120  # the number of tokens shown of the end of a prompt
NODE_TOKENS = 40  # the number of tokens shown of the beginning of a tree node
TOKEN_IDS = 2**32  # a first token beyond it also names the LoRA adapter of the prefix


class Observer:
    """Holds the live requests, and the state after the last frame."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.scheduler = engine.core.scheduler
        self.kv_cache: Any = getattr(engine.core.scheduler, "kv_cache", None)
        self.radix_cache: Any = getattr(self.kv_cache, "radix_cache", None)
        self.requests: list[RequestInfo] = []  # all of them; a reader may empty the list
        self.news: list[RequestInfo] = []  # those that were new or changed in the last frame
        self.tree_changed = True  # since the last frame; `Trace` watches the tree's methods
        self._infos: dict[Request, RequestInfo] = {}  # only of live requests
        self._request_numbers = count()
        self._moved: dict[int, RequestInfo] = {}  # new or changed since the last frame
        self._row_owners: dict[int, int] = {}  # the last request that ran in a row
        self._rows: list[tuple[int | None, list[int]]] = []  # owner and pages, in the last frame
        self._nodes: dict[Any, int] = {}
        self._node_numbers = count(1)
        self._before = State()
        for request in engine.output_processor.requests.values():
            self.add_request(request)

    def add_request(self, request: Request) -> None:
        """Record a new request and give it the next number."""
        info = RequestInfo(
            number=next(self._request_numbers),
            request_id=request.request_id,
            prompt=self._text(request.token_ids[-PROMPT_TOKENS:]),
            num_prompt_tokens=request.num_prompt_tokens,
            max_num_tokens=request.max_num_tokens,
            arrival=request.arrival_time,
        )
        self._infos[request] = self._moved[info.number] = info
        self.requests.append(info)

    def batch(self, scheduled: Any) -> dict[int, int]:
        """Return the number of scheduled tokens of each request; empty if nothing was scheduled."""
        requests = getattr(scheduled, "requests", ())
        counts = getattr(scheduled, "num_scheduled_tokens", ())
        return {self.number(r): n for r, n in zip(requests, counts, strict=True)}

    def number(self, request: Request) -> int:
        return self._infos[request].number

    def look(self, frame: Frame) -> Frame:
        """Fill in what has changed since the last call, and return the frame."""
        waiting = [self.number(request) for request in self.scheduler.waiting]
        if waiting != self._before.waiting:
            frame.waiting = waiting
        stats = asdict(self.engine.stats())
        frame.stats = changed(self._before.stats, stats)
        if hasattr(self.kv_cache, "table"):
            frame.pages = self._pages()
        if self.radix_cache is not None and self.tree_changed:
            frame.nodes = self._tree()
        frame.requests = self._requests()
        self._before.apply(frame)
        self.news, self._moved, self.tree_changed = list(self._moved.values()), {}, False
        for info in self.news:
            if info.end is not None:  # no later frame has this request
                self._before.requests.pop(info.number, None)
        return frame

    def snapshot(self, step: int, now: float) -> tuple[list[RequestInfo], Frame]:
        """Return the live requests, and the state after the last frame as one frame."""
        state = self._before
        frame = Frame(
            step, now, now,
            waiting=list(state.waiting),
            requests={number: dict(request) for number, request in state.requests.items()},
            pages=dict(state.pages),
            nodes={number: dict(node) for number, node in state.nodes.items()},
            stats=dict(state.stats),
        )  # fmt: skip
        return list(self._infos.values()), frame

    def _requests(self) -> dict[int, dict[str, Any]]:
        running = set(self.scheduler.running)
        changes = {}
        for request, info in list(self._infos.items()):
            before = self._before.requests.get(info.number, {"text": ""})
            state = _state(request, running)
            if state == "waiting" == before.get("state"):
                continue  # so that a long queue costs almost no time
            change = changed(
                before,
                {
                    "state": state,
                    "row": request.row,
                    "tokens": request.num_tokens,
                    "computed": request.num_computed_tokens,
                    "cached": request.num_cached_tokens or 0,
                    "node": self._node_of(request),
                    "pages": self._table_of(request),
                },
            )
            if text := request.text.visible[len(before["text"]) :]:
                change["text"] = text
            if change:
                changes[info.number] = change
            self._note_times(request, info)
        return changes

    def _table_of(self, request: Request) -> list[int] | None:
        """Return the page table of a request. None: it has none."""
        return self._rows[request.row][1] if self._rows and request.row is not None else None

    def _node_of(self, request: Request) -> int | None:
        """Return the tree node that ends the prefix that a request holds. None: it holds none."""
        if self.radix_cache is None or request.row is None:
            return None
        return self._nodes.get(self.kv_cache.last_nodes[request.row])

    def _note_times(self, request: Request, info: RequestInfo) -> None:
        if info.first_token is None and request.first_token_time is not None:
            info.first_token = request.first_token_time
            self._moved[info.number] = info
        if request.is_finished:
            info.end, info.finish_reason = request.finished_time, request.finish_reason
            self._moved[info.number] = info
            del self._infos[request]

    def _pages(self) -> dict[int, PageOwner]:
        """Return the pages with a new owner.

        A row begins with pages of the tree. For these pages the owner is the tree, not the request.
        A row may exist longer than its request, as long as a forward may still write to it. If the
        tree did not change, only the pages of rows that changed can have new owners.
        """
        for request in self.scheduler.running:
            self._row_owners[request.row] = self.number(request)
        table = enumerate(self.kv_cache.table.rows)
        rows = [(self._row_owners.get(row), self._pages_of(blocks)) for row, blocks in table]
        old = self._rows or [(None, [])] * len(rows)
        self._rows = rows
        before = self._before.pages
        if self.radix_cache is not None and self.tree_changed:
            owners = owners_of(rows)
            for node in self.radix_cache.nodes():
                owners.update(dict.fromkeys(self._pages_of(node.pages), TREE))
        else:
            moved = [row for row in range(len(rows)) if rows[row] != old[row]]
            owners = owners_of([rows[row] for row in moved])
            left = owners_of([old[row] for row in moved])
            before = {page: before[page] for page in left | owners if page in before}
            in_tree = [page for page, owner in before.items() if owner == TREE]
            owners.update(dict.fromkeys(in_tree, TREE))
        changes = changed(before, owners)
        changes.update(dict.fromkeys(before.keys() - owners.keys()))
        return changes

    def _pages_of(self, blocks: list[int]) -> list[int]:
        """Return the pages of the blocks of a row or a node.

        A block is a page, except in an allocator with groups of layers. There it may have a page in
        each group, and its number is a page only if a group has full attention.
        """
        allocator = self.kv_cache.allocator
        windows = [window.pages for window in getattr(allocator, "windows", ())]
        in_windows = [pages[block] for pages in windows for block in blocks if block in pages]
        return [*(blocks if getattr(allocator, "has_full", True) else ()), *in_windows]

    def _tree(self) -> dict[int, dict[str, Any] | None]:
        numbers: dict[Any, int] = {}  # a new dict, so that evicted nodes are not kept alive
        changes: dict[int, dict[str, Any] | None] = {}
        for node in self.radix_cache.nodes():
            number = numbers[node] = self._nodes.get(node) or next(self._node_numbers)
            before = self._before.nodes.get(number, {})
            now = {
                "parent": numbers.get(node.parent, 0),
                "locks": node.lock_count,
                "hits": node.hits,
            }
            pages = self._pages_of(node.pages)
            if before.get("pages") != pages:
                tokens = [token % TOKEN_IDS for token in node.tokens[:NODE_TOKENS]]
                now |= {"pages": pages, "text": self._text(tokens)}
            if change := changed(before, now):
                changes[number] = change
        gone = self._before.nodes.keys() - set(numbers.values())
        self._nodes = numbers
        return {**changes, **dict.fromkeys(gone)}

    def _text(self, token_ids: list[int]) -> str:
        return str(self.engine.loaded.tokenizer.decode(token_ids))


def owners_of(rows: list[tuple[int | None, list[int]]]) -> dict[int, PageOwner]:
    """Return the owner of each page of some rows."""
    owners: dict[int, PageOwner] = {}
    for owner, pages in rows:
        owners.update(dict.fromkeys(pages, owner))
    return owners


def changed(before: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """Return the items of `now` that differ from `before`. A key missing in `before` means None."""
    return {key: value for key, value in now.items() if before.get(key) != value}


def _state(request: Request, running: set[Request]) -> str:
    """Return the state of a request in one word.

    A request that computes its tokens again after a retraction is in `prefill` too.
    """
    if request.finish_reason is not None:
        return request.finish_reason
    if request not in running:
        return "waiting"
    to_compute = request.num_tokens - request.num_computed_tokens
    return "prefill" if to_compute > 1 or request.num_output_tokens == 0 else "decode"
