"""structured_output: queues, masks and delayed sampling, with grammars that need no library."""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from common import SamplingParams, StructuredOutputsParams
from milestones.lab.instruments.streams import EarlyStream, LateStream
from tests.conftest import EngineFactory, ModuleOf, schedules
from tests.exercises.by_hand import watch
from tests.helpers.fake_grammars import (
    END,
    MaskRunner,
    StepGrammar,
    expected_under,
    structured,
    with_fakes,
)
from tests.helpers.fake_overlap import expected_output, hash_engine
from tests.helpers.oracle import completions, drain, greedy
from tests.helpers.random_schedule import add_random, random_prompt, random_sizes, run_schedule

pytestmark = [pytest.mark.since("structured_output"), pytest.mark.streams]

PROMPT = [5, 6, 7]
PATIENCE = 60.0  # seconds until a test that hangs fails


def params_of(salt: int, length: int, max_tokens: int = 30, **more: Any) -> SamplingParams:
    return greedy(max_tokens, structured_outputs=structured(salt, length), **more)


def engine_of(module_of: ModuleOf, num_pages: int = 60, late: bool = True, **config: Any) -> Any:
    stream = LateStream() if late else EarlyStream()
    config = {"page_size": 2, **config}
    return hash_engine(module_of("engine"), stream, num_pages, MaskRunner, **config)


class Schedule:
    """One random schedule: arrivals, grammars that come late or never, stops, aborts, failures."""

    def __init__(self, module: Any, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        page_size, self.longest, num_pages = random_sizes(chance, (1, 2, 3, 4, 16), (6, 20))
        self.engine = hash_engine(
            module, chance.choice([LateStream, EarlyStream])(), num_pages, MaskRunner,
            page_size=page_size, max_num_seqs=chance.randint(1, 10),
            max_num_batched_tokens=chance.choice([1, 2, 5, 16, 64]),
            enable_overlap=chance.random() < 0.8,
        )  # fmt: skip
        if chance.random() < 0.5:
            self.engine.core.scheduler.admission.new_token_ratio = 0.0  # requests join too early
        self.compiler = with_fakes(self.engine, at_once=False)
        self.engine.core.scheduler.grammars.wait = lambda seconds: None
        self.bad: set[str] = set()  # requests of which the grammar was refused
        self.finals = run_schedule(
            self.engine, chance, self.add, chance.randint(1, 12), arrivals=0.4, aborts=0.06,
            before_step=self.compile, may_fail=True,
        )  # fmt: skip
        self.check()

    def add(self) -> tuple[str, list[int]]:
        chance, engine = self.chance, self.engine
        prompt = random_prompt(chance, self.longest, [[]])
        if chance.random() < 0.4:
            return add_random(engine, chance, prompt)
        salt, length = chance.randrange(10**6), chance.choice([1, 2, 4, 10, 60])
        max_tokens = chance.choice([1, 2, 5, 12, 30])
        most = min(max_tokens, engine.core.scheduler.kv_cache.max_tokens + 1 - len(prompt))
        name = engine.add_request(prompt, params_of(salt, length, max_tokens))
        return name, expected_under(prompt, most, salt, length)

    def compile(self) -> None:
        """Let some compilations end, in any order; a few fail."""
        while self.compiler.pending and self.chance.random() < 0.4:
            number = self.chance.randrange(len(self.compiler.pending))
            future = self.compiler.pending[number][0]
            fails = self.chance.random() < 0.1
            waiting = self.engine.core.scheduler.grammars.queue.items()
            names = {request.request_id for request, (f, _) in waiting if f is future}
            self.compiler.finish(number, ValueError("a bad grammar") if fails else None)
            self.bad |= names if fails else set()

    def ended_by(self, reason: str) -> set[str]:
        return {name for name, found in self.finals.items() if found.finish_reason == reason}

    def check(self) -> None:
        failed = self.ended_by("error")
        assert failed == self.bad - self.ended_by("abort")
        for name in failed:
            assert (self.finals[name].token_ids, self.finals[name].error) == ([], "a bad grammar")
        outputs = [c.token_ids for c in self.finals.values()]
        for state in self.compiler.states():
            assert state.accepted in outputs or not state.accepted, "a token is not taken once"
        grammars = self.engine.core.scheduler.grammars
        assert not grammars.queue and not grammars.grammars, "I3: a grammar is left"


def test_random_schedules_with_grammars(module_of: ModuleOf) -> None:
    """Each step is audited. Tokens depend on every mask, and on every token before it."""
    runs = [Schedule(module_of("engine"), seed) for seed in range(schedules(1000))]
    accepted = [state.accepted for run in runs for state in run.compiler.states()]
    assert sum(run.engine.stats().num_retractions for run in runs) > len(runs) // 200
    assert sum(len(run.bad) for run in runs) > len(runs) // 10
    assert sum(len(run.ended_by("abort")) for run in runs) > len(runs) // 20
    assert sum(map(len, accepted)) > 9 * len(runs)


@pytest.mark.parametrize("late", [True, False])
def test_the_forward_is_launched_before_the_tokens_and_sampled_after(
    module_of: ModuleOf, late: bool
) -> None:
    """Delayed sampling: launch 2, accept 1, sample 2. Without overlap, accept 1 comes first."""
    for overlap in (True, False):
        engine = engine_of(module_of, late=late, enable_overlap=overlap)
        compiler, events = with_fakes(engine), record(engine)
        engine.add_request(PROMPT, params_of(1, 3))
        drain(engine)
        ahead = ["launch", "sample", *["launch", "accept", "sample"] * 3, "launch", "accept"]
        assert events == (ahead if overlap else ["launch", "sample", "accept"] * 4)
        assert compiler.states()[0].accepted == expected_under(PROMPT, 30, 1, 3)


def record(engine: Any) -> list[str]:
    """Return a list to which each launch, sampling and acceptance appends its name."""
    events: list[str] = []
    watch(engine.core.runner, "launch", lambda *_: events.append("launch"))
    watch(engine.core.runner, "sample", lambda *_: events.append("sample"))
    watch(engine.core.scheduler.grammars, "accept", lambda *_: events.append("accept"))
    return events


def test_only_steps_with_grammars_are_sampled_later(module_of: ModuleOf) -> None:
    """A plain request pays for the steps that it shares with a grammar, and for no others."""
    engine, delayed = engine_of(module_of), list[int]()
    with_fakes(engine)
    watch(engine.core.runner, "sample", lambda result, *_: delayed.append(len(result.places)))
    engine.add_request(PROMPT, greedy(20, ignore_eos=True), "plain")
    for _ in range(4):
        engine.step()
    assert delayed == []
    engine.add_request([1, 2], params_of(3, 4), "grammar")
    finals = completions(engine)
    assert delayed == [2] * 6, "four tokens, the end, and the step in flight with it"
    assert finals["plain"].token_ids == expected_output(PROMPT, 20)


def test_no_mask_before_the_end_of_the_prompt(module_of: ModuleOf) -> None:
    """A prompt of 100 tokens in chunks of 32: nothing is masked before the fourth chunk."""
    engine = engine_of(module_of, max_num_batched_tokens=32)
    with_fakes(engine)
    events, prompt = record(engine), [token % 50 for token in range(100)]
    engine.add_request(prompt, params_of(1, 3, 20))
    [final] = completions(engine).values()
    assert events[:5] == ["launch", "launch", "launch", "launch", "sample"]
    assert final.token_ids == expected_under(prompt, 20, 1, 3)


def test_a_retracted_request_keeps_its_place_in_the_grammar(module_of: ModuleOf) -> None:
    """The grammar takes each output token once, even if the request computes it again."""
    for count in range(1, 8):
        engine = engine_of(module_of, num_pages=60)
        compiler = with_fakes(engine)
        name = engine.add_request(PROMPT, params_of(2, 9))
        while len(accepted(compiler)) < count:
            engine.step()
        engine.core.undo_steps_in_flight()
        engine.core.scheduler.retract(engine.core.scheduler.running[0])
        assert len(accepted(compiler)) == count and engine.core.scheduler.waiting
        final = completions(engine)[name]
        assert final.token_ids == accepted(compiler) == expected_under(PROMPT, 30, 2, 9)
        assert engine.stats().num_retractions == 1


def accepted(compiler: Any) -> list[int]:
    states = compiler.states()
    return list(states[0].accepted) if states else []


@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5])
def test_cut_output_is_told_so(module_of: ModuleOf, max_tokens: int) -> None:
    """Four tokens and an end: with the end as the last permitted token, the output is whole."""
    engine = engine_of(module_of)
    with_fakes(engine)
    engine.add_request(PROMPT, params_of(1, 4, max_tokens), "a")
    final = completions(engine)["a"]
    assert final.finish_reason == ("stop" if max_tokens == 5 else "length")
    assert final.token_ids == expected_under(PROMPT, max_tokens, 1, 4)


def test_an_illegal_token_ends_only_its_request(module_of: ModuleOf) -> None:
    engine = engine_of(module_of)
    with_fakes(engine)
    names = [engine.add_request([i, 9], params_of(i, 10), f"r{i}") for i in range(3)]
    for _ in range(4):
        engine.step()
    grammars = engine.core.scheduler.grammars.grammars
    (grammar,) = [g for request, g in grammars.items() if request.request_id == "r1"]
    grammar.length = len(grammar.accepted) + 1  # only the end is allowed after the token in flight
    grammar.fill = StepGrammar(1, 10).fill  # ... but the mask does not say so
    finals = completions(engine)
    assert finals["r1"].finish_reason == "error"
    assert "does not allow the sampled token" in (finals["r1"].error or "")
    for i in (0, 2):
        assert finals[names[i]].token_ids == expected_under([i, 9], 30, i, 10)
        assert finals[names[i]].token_ids[-1] == END


def test_other_requests_do_not_wait_for_a_grammar(module_of: ModuleOf) -> None:
    """A plain request that arrives later starts first; ten slow grammars cost no waiting."""
    engine = engine_of(module_of)
    compiler, waits = with_fakes(engine, at_once=False), list[float]()
    engine.core.scheduler.grammars.wait = waits.append
    engine.add_request([8, 9], greedy(30, ignore_eos=True), "runs")
    engine.step()
    for number in range(10):
        engine.add_request(PROMPT, params_of(number, 3), f"slow{number}")
    engine.add_request([4], greedy(3, ignore_eos=True), "later")
    for _ in range(4):
        names = {output.request_id for output in engine.step()}
        assert "runs" in names and not any(name.startswith("slow") for name in names)
    assert not waits, "a step with other work never waits for a compiler"
    assert engine.stats().num_waiting == 10
    while compiler.pending:
        compiler.finish()
    finals = completions(engine)
    assert finals["slow3"].token_ids == expected_under(PROMPT, 30, 3, 3)


def test_an_idle_engine_waits_for_a_compiler_and_does_not_spin(module_of: ModuleOf) -> None:
    engine = engine_of(module_of)
    compiler, waits = with_fakes(engine, at_once=False), list[float]()
    engine.core.scheduler.grammars.wait = waits.append
    engine.add_request(PROMPT, params_of(1, 2), "a")
    assert engine.step() == [] and engine.step() == [] and len(waits) == 2
    engine.abort_request("a")
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
    assert len(waits) == 2, "an output that is ready is not held back"
    compiler.finish()
    assert engine.step() == [], "the late result changes nothing"
    assert not engine.core.scheduler.waiting
    assert not engine.has_unfinished_requests()


def test_a_grammar_that_takes_too_long(module_of: ModuleOf) -> None:
    engine = engine_of(module_of)
    with_fakes(engine, at_once=False)
    engine.core.scheduler.grammars.timeout = 0.0
    engine.add_request(PROMPT, params_of(1, 2), "late")
    engine.add_request([4], greedy(2, ignore_eos=True), "plain")
    finals = completions(engine)
    assert finals["late"].finish_reason == "error" and "0 s" in (finals["late"].error or "")
    assert finals["plain"].finish_reason == "length"


def test_requests_share_a_compilation_and_no_state(module_of: ModuleOf) -> None:
    """Equal parameters are compiled once; equal texts of another kind are not equal."""
    made, manager = list[Any](), module_of("grammar_manager")

    def slow(wanted: Any) -> StepGrammar:
        made.append(wanted)
        time.sleep(0.01)
        return StepGrammar(0, 3)

    compiler = manager.GrammarCompiler(slow)
    regex = StructuredOutputsParams(regex="[0-9]+")
    choice = StructuredOutputsParams(choice=["[0-9]+"])
    futures = [compiler.submit(wanted) for wanted in [regex, choice] * 10]
    assert len({id(future.result()) for future in futures}) == 2 and len(made) == 2
    one, other = futures[0].result().fork(), futures[0].result().fork()
    assert one.accept(0) and not other.accepted
    for number in range(manager.NUM_CACHED + 10):
        compiler.submit(StructuredOutputsParams(regex=str(number)))
    assert len(compiler.cache) == manager.NUM_CACHED
    compiler.close()


class HeldCompile:
    """A compile function that keeps all threads of a compiler busy until it is released."""

    def __init__(self, num_threads: int) -> None:
        self.begun: SimpleQueue[StructuredOutputsParams] = SimpleQueue()
        self.made: list[StructuredOutputsParams] = []
        self.released = threading.Event()
        self.blockers = [structured(10**6 + number, 1) for number in range(num_threads)]

    def __call__(self, wanted: StructuredOutputsParams) -> StepGrammar:
        self.made.append(wanted)
        self.begun.put(wanted)
        assert self.released.wait(PATIENCE)
        return StepGrammar(0, 3)

    def wait_for_blockers(self) -> None:
        """Wait until each thread compiles. What is submitted from now on is queued."""
        for _ in self.blockers:
            self.begun.get(timeout=PATIENCE)

    def made_after(self) -> list[StructuredOutputsParams]:
        return [wanted for wanted in self.made if wanted not in self.blockers]


@pytest.mark.parametrize("ends_by", ["abort", "timeout"])
def test_what_no_request_waits_for_is_not_compiled(module_of: ModuleOf, ends_by: str) -> None:
    """Sixteen requests end while their grammars are queued. The next one does not wait for them."""
    engine = engine_of(module_of)
    engine.input_processor.no_structured_outputs = None
    manager = engine.core.scheduler.grammars
    held = manager.compiler.compile = HeldCompile(module_of("grammar_manager").NUM_THREADS)
    blocking = [manager.compiler.submit(wanted) for wanted in held.blockers]
    held.wait_for_blockers()
    engine.add_request(PROMPT, params_of(3, 3), "kept")
    manager.timeout = 0.0 if ends_by == "timeout" else PATIENCE
    for number in range(16):  # each grammar is that of two requests
        for half in "ab":
            engine.add_request(PROMPT, params_of(number, 3), f"{number}{half}")
    for number in range(16):
        for half in "ab" if ends_by == "abort" else "":
            assert engine.abort_request(f"{number}{half}")
    reasons = {output.outputs[0].finish_reason for output in engine.step()}
    assert reasons == {"abort" if ends_by == "abort" else "error"}
    manager.timeout = PATIENCE
    engine.add_request(PROMPT, params_of(99, 3), "next")
    held.released.set()
    finals = drain(engine)
    assert finals["kept"][-1].finished and finals["next"][-1].finished
    assert held.made_after() == [structured(3, 3), structured(99, 3)]
    assert all(future.result() for future in blocking), "a compilation that runs goes on"
    engine.close()


def test_a_compilation_is_cancelled_when_its_last_request_has_ended(module_of: ModuleOf) -> None:
    manager = module_of("grammar_manager")
    held = HeldCompile(manager.NUM_THREADS)
    compiler = manager.GrammarCompiler(held)
    for wanted in held.blockers:
        compiler.submit(wanted)
    held.wait_for_blockers()
    shared, alone = structured(1, 1), structured(2, 1)
    first, second = compiler.submit(shared), compiler.submit(shared)
    compiler.abandon(first)
    assert not second.cancelled(), "another request waits for it"
    cancelled = compiler.submit(alone)
    compiler.abandon(cancelled)
    assert cancelled.cancelled() and alone not in compiler.cache
    again = compiler.submit(alone)
    held.released.set()
    assert second.result(PATIENCE) is first.result(PATIENCE) and again.result(PATIENCE)
    compiler.abandon(second)  # too late, so it changes nothing
    assert compiler.submit(shared).result(PATIENCE) is first.result()
    compiler.close()
    assert held.made_after() == [shared, alone]


@pytest.mark.parametrize("passing", [MemoryError(), RuntimeError("planted"), SystemExit("panic")])
def test_only_verdicts_are_remembered(module_of: ModuleOf, passing: BaseException) -> None:
    """A bad grammar stays bad. Memory may be free the next time."""
    outcomes: list[Any] = [passing, StepGrammar(0, 3), ValueError("a bad grammar")]

    def compile_grammar(wanted: StructuredOutputsParams) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    compiler = module_of("grammar_manager").GrammarCompiler(compile_grammar)
    good, bad = structured(1, 1), structured(2, 1)
    assert compiler.submit(good).exception(PATIENCE) is passing
    grammar = compiler.submit(good).result(PATIENCE)
    assert compiler.submit(good).result(PATIENCE) is grammar
    for _ in range(2):
        assert str(compiler.submit(bad).exception(PATIENCE)) == "a bad grammar"
    assert not outcomes and list(compiler.cache) == [good, bad]
    compiler.close()


@pytest.mark.parametrize("size", [31, 32, 33, 95, 300])
def test_masks_of_every_width(module_of: ModuleOf, size: int) -> None:
    """Rows without a grammar are bit-equal; columns after the last word are never allowed."""
    bitmask, chance = module_of("bitmask"), random.Random(size)
    words = bitmask.num_words(size)
    allowed = [sorted(chance.sample(range(size), size // 3)) for _ in range(2)]
    bits = torch.zeros(2, words, dtype=torch.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= torch.tensor(1 << token % 32).int()
    for columns in (size, size + 40):
        logits = torch.randn(4, columns)
        masked = bitmask.TokenMask(torch.tensor([1, 3]), bits)(logits)
        assert torch.equal(masked[[0, 2]], logits[[0, 2]])
        for row, tokens in zip((1, 3), allowed, strict=True):
            assert masked[row].isfinite().nonzero().flatten().tolist() == tokens
            assert torch.equal(masked[row, tokens], logits[row, tokens])


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"json": {}, "regex": "a"}, {"json": "{"}, {"json": "[]"}, {"json": {"a": {1}}},
        {"json": '{"a":' * 5000 + "1" + "}" * 5000}, {"regex": ""}, {"regex": "a" * 100_001},
        {"regex": 3}, {"choice": []}, {"choice": "yes"}, {"choice": [""]}, {"choice": ["\ud83d"]},
        {"choice": ["a"] * 10_001},
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused(wrong: Any) -> None:
    """I4: where they are made, with the name of the field."""
    with pytest.raises(ValueError, match="structured_outputs"):
        StructuredOutputsParams(**wrong)


def test_parameters_that_exclude_each_other() -> None:
    grammar: Any = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(structured_outputs=grammar, ignore_eos=True)
    with pytest.raises(ValueError, match="structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert hash(SamplingParams(structured_outputs=grammar)) == hash(
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    )


def test_a_missing_library_is_named(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    engine.input_processor.no_structured_outputs = "llguidance is not installed"
    with pytest.raises(ValueError, match="structured_outputs: llguidance is not installed"):
        engine.add_request(PROMPT, params_of(1, 2))
    assert not engine.has_unfinished_requests()
