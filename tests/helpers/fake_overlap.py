"""The overlap engine without tensors: the real engine and scheduler, and a runner that hashes.

The idea is that of `fake_paged`. Here, however, the stream decides when a step is computed, and the
step uses the page table as it was at the launch of the step. On a late stream, a step is computed
after the next step has been planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from common import EngineConfig, LoadedModel
from milestones.lab.instruments.audit import sides
from milestones.lab.instruments.hash_model import hash_model
from milestones.lab.instruments.streams import HandEvent, LateStream, Work
from tests.helpers.fake_paged import expected_tokens, kv_of, next_token

FAKE: LoadedModel = hash_model()
PADDING_PAGE = 0
HIDDEN_SIZE = 3


def text_of(tokens: list[int]) -> str:
    return str(FAKE.tokenizer.decode(tokens))


def state_of(kv: int) -> list[float]:
    """Return the "hidden state" of a token, [HIDDEN_SIZE]. A float32 holds sums of many exactly."""
    return [float(kv % prime) for prime in (97, 89, 83)]


def expected_states(prompt: list[int]) -> torch.Tensor:
    """Return the hidden states of a prompt, [T, HIDDEN_SIZE], computed from the tokens alone."""
    kv: tuple[int, ...] = ()
    for position, token in enumerate(prompt):
        kv = (*kv, kv_of(kv, token, position))
    return torch.tensor([state_of(value) for value in kv])


def with_adapter(token: int, number: int | None) -> Any:
    """Return what a token means to the hashes of a request with this load of an adapter."""
    return token if number is None else (token, number)


def expected_output(
    prompt: list[int],
    max_tokens: int,
    stops: Sequence[int] = (),
    stop: str = "",
    number: int | None = None,
) -> list[int]:
    """Return the expected answer up to its first stop, computed from the token list alone."""
    output: list[int] = []
    for token in expected_tokens(prompt, max_tokens, lambda token: with_adapter(token, number)):
        output.append(token)
        if token in stops or (stop and stop in text_of(output)):
            break
    return output


@dataclass
class HashResult:
    """The result of a launched step. The tokens are there after `wait`."""

    tokens: list[int]
    event: HandEvent | None = None
    pooled: list[torch.Tensor] = field(default_factory=list)  # sums of hidden states
    is_delayed: bool = False  # the step is not sampled yet: see `fake_grammars`

    def wait(self) -> list[tuple[int, None]]:
        assert self.event is not None
        self.event.wait()
        return [(token, None) for token in self.tokens]


@dataclass
class Part:
    """One request's part of a step, as it was when the step was launched."""

    row: int
    pages: list[int]
    start: int
    tokens: list[int]
    num_outputs: int  # of the last tokens: each gives a next token
    has_drafts: bool
    num_pooled: int  # that many of the last tokens give hidden states to a pooling request
    slot: int  # of its LoRA adapter; 0: none


@dataclass
class HashHostPool:
    """The pages in host memory: the hashes of their slots."""

    num_pages: int
    pages: dict[int, list[int]] = field(default_factory=dict)

    def measure(self) -> float:
        return 0.0


class HashRunner:
    """The part of a `ModelRunner` that the engine uses."""

    def __init__(self, num_pages: int, page_size: int, stream: LateStream) -> None:
        groups = (SimpleNamespace(layers=(0,), window=None, num_snapshots=None),)
        self.kv_pool = SimpleNamespace(num_pages=num_pages, groups=groups)
        self.states = SimpleNamespace(groups=())
        self.graphs = type("Graphs", (), {"num_replays": 0})()
        self.hidden_size = HIDDEN_SIZE  # for an engine that reads hidden states
        self.host_pool = HashHostPool(2 * num_pages)  # for an engine that has one
        self.lora = SimpleNamespace(shapes={}, stage=dict)  # for an engine with adapters
        self.encoder = SimpleNamespace(num_encoded=0)  # for an engine with images
        self.copy_stream = type(stream)()
        self.copied: HandEvent | None = None
        self.is_copying = False
        self.computed: HandEvent | None = None
        self.page_size = page_size
        self.stream = stream
        self.memory: dict[int, int] = {}
        self.futures: dict[int, int] = {}
        self.rows: dict[int, dict[int, int]] = {}
        self.free_pages: list[int] = []  # the list of the allocator itself, not a copy
        self.num_launches = 0
        self.adapters: dict[int, int] = {}  # by slot: the number of the load
        self.fails: Callable[[], bool] = bool  # asked by each forward, before it is computed

    @functools.cached_property
    def prefill_runner(self) -> Any:
        """Return the runner of the other side, for an engine that has two."""
        from tests.helpers.fake_sides import HashPrefillRunner

        return HashPrefillRunner(self)

    def launch(self, batch: Any, table: Any) -> HashResult:
        self.num_launches += 1
        for row, column, page in table.take_updates():
            self.rows.setdefault(row, {})[column] = page
        parts = []
        for i, (request, n) in enumerate(
            zip(batch.requests, batch.num_scheduled_tokens, strict=True)
        ):
            assert request.num_tokens < request.max_num_tokens, "this request is known to end"
            start = request.num_computed_tokens
            width = -(-(start + n) // self.page_size)
            drafts = getattr(batch, "drafts", {}).get(request, [])
            pages = [self.rows[request.row].get(c, PADDING_PAGE) for c in range(width)]
            tokens = [*request.token_ids[start : start + n], *drafts]
            assert len(tokens) == n and (not drafts or min(tokens) >= 0), "I1: a wrong input"
            outputs = 1 + len(drafts) if i in batch.sampled_indices else 0
            pooled = 0
            if i in getattr(batch, "pooled_indices", ()):
                pooled = n if request.needs_all_tokens else 1
            slot = getattr(batch, "slots", {i: 0})[i]
            parts.append(
                Part(request.row + 1, pages, start, tokens, outputs, bool(drafts), pooled, slot)
            )
        result = HashResult([])
        loads = getattr(batch, "loads", ())

        def work() -> None:
            self.adapters |= {load.slot: load.adapter.number for load in loads}
            if self.fails():
                raise RuntimeError("a forward fails")
            self._compute(parts, result)

        result.event = self.computed = self.launch_after_copies(work)
        return result

    def launch_after_copies(self, work: Work) -> HandEvent:
        """Launch work that waits for the copies that were started before."""
        copied = self.copied

        def waiting() -> None:
            if copied is not None:
                copied.wait()
            work()

        return self.stream.launch(waiting)

    def copy_pages(self, transfers: list[Any]) -> None:
        """Copy pages between the memory and the host, on a stream of its own."""
        if not transfers:
            return
        computed = self.computed

        def work() -> None:
            self.is_copying = True
            self._copy(transfers, computed)
            self.is_copying = False

        self.copied = self.copy_stream.launch(work)

    def end_copies(self) -> bool:
        """Wait for all copies, and clear their failures. Return whether one has failed."""
        self.copy_stream.synchronize()
        has_failed, self.is_copying, self.copied = self.is_copying, False, None
        return has_failed

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        self.stream.close()

    def forget(self, pages: list[int]) -> None:
        """Clear the memory of free pages. The stream runs this as work."""
        for page in pages:
            for slot in range(page * self.page_size, (page + 1) * self.page_size):
                self.memory.pop(slot, None)

    def _copy(self, transfers: list[Any], computed: HandEvent | None) -> None:
        for page, host_page, to_host in transfers:
            slots = range(page * self.page_size, (page + 1) * self.page_size)
            if to_host:
                assert all(slot in self.memory for slot in slots), "I3: an empty page is copied"
                self.host_pool.pages[host_page] = [self.memory[slot] for slot in slots]
                continue
            if computed is not None:
                computed.wait()
            self.memory.update(zip(slots, self.host_pool.pages[host_page], strict=True))

    def _compute(self, parts: list[Part], result: HashResult) -> None:
        for part in parts:
            tokens = [self.futures[-t] if t < 0 else t for t in part.tokens]
            kv = tuple(self.memory[self._slot(part, p)] for p in range(part.start))
            for position, token in enumerate(tokens, part.start):
                page = part.pages[position // self.page_size]
                assert page not in self.free_pages, "I3: a free page is written"
                value = kv_of(kv, with_adapter(token, self.adapters.get(part.slot)), position)
                self.memory[self._slot(part, position)] = value
                kv = (*kv, value)
                if position >= part.start + len(tokens) - part.num_outputs:
                    result.tokens.append(next_token(kv))
            if part.num_pooled:
                states = [state_of(value) for value in kv[-part.num_pooled :]]
                result.pooled.append(torch.tensor(states).sum(dim=0))
            if part.num_outputs and not part.has_drafts:
                self.futures[part.row] = result.tokens[-1]

    def _slot(self, part: Part, position: int) -> int:
        page = part.pages[position // self.page_size]
        assert page != PADDING_PAGE, "I3: a request reads or writes the padding page"
        return page * self.page_size + position % self.page_size


def clear_free_pages(core: Any) -> None:
    """Clear the free pages of a core after its steps in flight. See `poison_free_pages`."""
    runner, allocator = core.runner, core.scheduler.kv_cache.allocator
    pages = list(allocator.free_pages)
    runner.free_pages = allocator.free_pages
    may_be_written = hasattr(core, "receiver")

    def clear() -> None:
        free = set(allocator.free_pages) if may_be_written else pages
        runner.forget([page for page in pages if page in free])

    runner.computed = runner.launch_after_copies(clear)


def hash_engine(
    module: ModuleType,
    stream: LateStream,
    num_pages: int,
    runner_class: type[HashRunner] = HashRunner,
    **config: Any,
) -> Any:
    """Return an `LLMEngine` of an `engine` module, on a fake runner, audited after every step."""
    engine_class: Any = module.LLMEngine

    class HashEngine(engine_class):
        def step(self) -> Any:
            with self.guard("step") as call:  # an interrupt in the audit must not lose the outputs
                outputs = call.keep(super().step())
                self.audit()
                return outputs

        def abort_request(self, request_id: str) -> bool:
            ended: bool = super().abort_request(request_id)
            self.audit()
            return ended

        def audit(self) -> None:
            """Check the invariants, and clear free pages after the steps in flight have run."""
            self.check_invariants()
            for core in sides(self):
                clear_free_pages(core)

    settings = EngineConfig(model="hash-model", num_pages=num_pages, max_model_len=200, **config)
    runner = runner_class(num_pages, settings.page_size, stream)
    package = module.__name__.rpartition(".")[0]
    with pytest.MonkeyPatch.context() as patch:  # an engine imports its runner when it is made
        patch.setattr(f"{package}.model_runner.ModelRunner", lambda *_: runner)
        return HashEngine(settings, FAKE)
