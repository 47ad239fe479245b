"""A request that cannot be computed ends with finish reason `error`, and the others go on."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import EngineDeadError, LoadedModel, Request, RequestOutput, SamplingParams
from common.engine_core import EngineCoreOutput
from common.failure_search import FailureSearch
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText
from milestones.lab.instruments.audit import sides
from milestones.lab.instruments.hash_model import expected_tokens, hash_model
from tests.conftest import EngineFactory, assert_idle, build_engine
from tests.exercises.by_hand import make_request
from tests.helpers.oracle import completions, drain, greedy

pytestmark = pytest.mark.streams

POISON = 251  # a token in the prompt of the request that fails
Answer = dict[str, RequestOutput]


def model_with(before_forward: Callable[..., None]) -> LoadedModel:
    """Return the hash model. It calls `before_forward` with the arguments of each forward."""
    loaded = hash_model()

    def hook(_model: Any, args: Any, inputs: dict[str, Any]) -> None:
        before_forward(*args, **inputs)

    loaded.model.register_forward_pre_hook(hook, with_kwargs=True)
    return loaded


def poisoned_model(fail: Callable[[Any, torch.Tensor], None]) -> LoadedModel:
    """Return the hash model. If `POISON` is in its input, it calls `fail(logits, input_ids)`."""
    loaded = hash_model()

    def hook(_model: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        input_ids = args[0] if args else inputs["input_ids"]
        if bool((input_ids == POISON).any()):
            fail(output.logits, input_ids)

    loaded.model.register_forward_hook(hook, with_kwargs=True)
    return loaded


def failing_after(num_forwards: list[int]) -> LoadedModel:
    """Return the hash model. It computes as many forwards as the list says, and then one fails."""

    def count(*_: Any, **__: Any) -> None:
        num_forwards[0] -= 1
        if num_forwards[0] == -1:
            raise Broken

    return model_with(count)


class Broken(Exception):
    pass


def run(engine: Any, prompts: dict[str, list[int]], **params: Any) -> Answer:
    for name, prompt in prompts.items():
        engine.add_request(prompt, greedy(6, ignore_eos=True, **params), name)
    finals = {}
    for _ in range(300):
        for output in engine.step():
            assert output.request_id not in finals, "I3: an output after the final one"
            if output.finished:
                finals[output.request_id] = output
        if not engine.has_unfinished_requests():
            assert_idle(engine)
            return finals
    raise AssertionError("I5: the search for the cause does not end")


PROMPTS = {str(i): [i + 1, i + 2, *([POISON] if i in (2, 5) else []), 9] for i in range(7)}


def raise_broken(*_: Any) -> None:
    raise Broken("boom")


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_requests_that_always_fail_end_and_the_others_answer(
    milestone: str, caplog: pytest.LogCaptureFixture, max_num_seqs: int
) -> None:
    engine = build_engine(milestone, poisoned_model(raise_broken), max_num_seqs=max_num_seqs)
    finals = run(engine, PROMPTS)
    for name, prompt in PROMPTS.items():
        completion = finals[name].outputs[0]
        if POISON in prompt:
            assert completion.finish_reason == "error" and completion.token_ids == []
            assert completion.error is not None and "Broken: boom" in completion.error
        else:
            assert completion.finish_reason == "length" and completion.error is None
            assert completion.token_ids == expected_tokens(prompt, 6)
    ended = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert ["'2'" in r.message for r in ended] == [True, False], "requests 2 and 5 must be logged"
    assert all(r.exc_info is not None and r.exc_info[0] is Broken for r in ended)


@pytest.mark.since("m2_continuous")
def test_the_search_is_short(milestone: str, caplog: pytest.LogCaptureFixture) -> None:
    """One of sixteen requests fails: the search takes four halvings and one repeated failure."""
    engine = build_engine(milestone, poisoned_model(raise_broken), max_num_seqs=16)
    prompts = {str(i): [i + 1, POISON if i == 11 else 3] for i in range(16)}
    finals = run(engine, prompts)
    assert [n for n, f in finals.items() if f.outputs[0].finish_reason == "error"] == ["11"]
    failures = [r for r in caplog.records if "forward failed" in r.message and r.levelno < 40]
    assert len(failures) <= math.log2(16) + 2


def test_a_request_that_comes_during_the_search_is_served(milestone: str) -> None:
    engine = build_engine(milestone, poisoned_model(raise_broken), max_num_seqs=4)
    for i in range(4):
        engine.add_request([i + 1, POISON if i == 3 else 3], greedy(6, ignore_eos=True), f"{i}")
    engine.step()
    engine.add_request([60, 61], greedy(6, ignore_eos=True), "late")
    finals = completions(engine)
    assert finals["late"].token_ids == expected_tokens([60, 61], 6)
    assert finals["3"].finish_reason == "error"
    assert_idle(engine)


def test_a_request_aborted_during_the_search_holds_nothing(milestone: str) -> None:
    engine: Any = build_engine(milestone, poisoned_model(raise_broken), max_num_seqs=4)
    for i in range(4):
        engine.add_request([i + 1, POISON], greedy(6), f"{i}")
    engine.step()
    for i in range(4):
        assert engine.abort_request(f"{i}")
    drain(engine)
    assert not engine.search.is_active, "I3: the search still holds an ended request"
    assert_idle(engine)


def test_an_abort_during_the_search_disturbs_no_other_request(milestone: str) -> None:
    """In m2 the last row moves into the row of the aborted request, also during the search."""
    left = [99]
    engine: Any = build_engine(milestone, failing_after(left), max_num_seqs=5)
    left[0] = 3  # not before: the engine tries the model when it is loaded
    for name in "abcde":
        engine.add_request([ord(name), 5], greedy(9, ignore_eos=True), name)
    outputs = {}
    while not engine.search.is_active:
        outputs.update({output.request_id: output for output in engine.step()})
    engine.abort_request("b")
    outputs |= {name: of_request[-1] for name, of_request in drain(engine).items()}
    assert outputs["b"].outputs[0].finish_reason == "abort"
    for name in "acde":
        assert outputs[name].outputs[0].token_ids == expected_tokens([ord(name), 5], 9)
    assert_idle(engine)


def test_a_failure_of_a_request_that_has_ended_since(milestone: str) -> None:
    """With overlap, the token that ends a request is already an input of the step that fails."""
    prompt, last = [60, 61], expected_tokens([60, 61], 3)[-1]

    def fail(input_ids: Any, position_ids: Any = None, **_: Any) -> None:
        if position_ids is not None:
            fed = (input_ids == last) & (position_ids == len(prompt) + 2)
            if bool(fed.any()):
                raise Broken

    engine = build_engine(milestone, model_with(fail))
    engine.add_request(prompt, greedy(9, stop_token_ids=[last], ignore_eos=True), "ends")
    for name in "ab":
        engine.add_request([ord(name), 5], greedy(9, ignore_eos=True), name)
    finals = completions(engine)
    assert finals["ends"].token_ids == expected_tokens(prompt, 3)
    assert finals["ends"].finish_reason == "stop"
    for name in "ab":
        assert finals[name].token_ids == expected_tokens([ord(name), 5], 9)
    assert_idle(engine)


@pytest.mark.since("m5_overlap")
def test_a_failure_does_not_undo_another_request_for_ever(milestone: str) -> None:
    """I5: `b` joins in the last step of `a`, fails before it is launched, and undoes that step."""
    engine: Any = build_engine(milestone, hash_model(), max_num_seqs=1, enable_overlap=True)

    def failing(prepare: Any, batch: Any, *args: Any) -> Any:
        if any(request.request_id == "b" for request in batch.requests):
            raise Broken("boom")
        return prepare(batch, *args)

    for inputs in [side.runner.inputs for side in sides(engine)]:
        inputs.prepare = partial(failing, inputs.prepare)
    finals = run(engine, {"a": [1, 2], "b": [3, 4], "c": [5, 6]})
    assert finals["b"].outputs[0].finish_reason == "error"
    for name, prompt in (("a", [1, 2]), ("c", [5, 6])):
        assert finals[name].outputs[0].token_ids == expected_tokens(prompt, 6)


class OneRow:
    """A core without a model. A step computes the oldest requests, as many as `width`."""

    def __init__(self, width: int = 99) -> None:
        self.scheduler = SimpleNamespace(waiting=deque[Request](), running=list[Request]())
        self.width = width

    def send_back(self) -> None:
        self.scheduler.waiting.extendleft(reversed(self.scheduler.running))
        self.scheduler.running.clear()

    def schedule(self) -> list[Request]:
        while self.scheduler.waiting and len(self.scheduler.running) < self.width:
            self.scheduler.running.append(self.scheduler.waiting.popleft())
        return list(self.scheduler.running)

    def finish(self, request: Request) -> None:
        request.finish_reason = "error"
        queues = self.scheduler.waiting, self.scheduler.running
        next(queue for queue in queues if request in queue).remove(request)


def searching(requests: list[Request], width: int = 99) -> tuple[Any, FailureSearch]:
    core: Any = OneRow(width)
    core.scheduler.waiting.extend(requests)
    return core, FailureSearch(core, max_step_tokens=4)


def test_failures_of_two_requests_are_not_added_up() -> None:
    """The first request is aborted after one failure alone. The second fails alone once, too."""
    first, second = make_request("a", [1]), make_request("b", [1])
    core, search = searching([first, second], width=1)
    assert search.failed(core.schedule()) is None
    search.release(first)
    core.finish(first)
    search.prepare()
    assert search.failed(core.schedule()) is None, "a request must fail alone twice before it ends"
    assert search.failed(core.schedule()) is second


def test_a_failure_at_another_place_is_another_failure() -> None:
    """A long prompt is computed in chunks. A fault that hits two of them passes."""
    request = make_request("a", [1] * 30)
    core, search = searching([request])
    for computed, cause in ((4, None), (20, None), (10, None), (12, request)):
        core.schedule()
        request.num_computed_tokens = computed
        assert search.failed([request]) is cause


def test_a_token_between_two_failures_saves_a_request() -> None:
    request = make_request("a", [1])
    core, search = searching([request])
    assert search.failed(core.schedule()) is None
    request.token_ids.append(5)
    assert search.failed(core.schedule()) is None
    assert search.failed(core.schedule()) is request


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_ends_its_request(
    milestone: str, value: float, temperature: float
) -> None:
    """The model spoils the logits of the requests that have the poison token in their prompts."""

    def spoil(logits: torch.Tensor, input_ids: torch.Tensor) -> None:
        if input_ids.shape[0] > 1 or logits.shape[1] == 1:  # each row is one request
            logits[(input_ids == POISON).any(dim=1), :, 5] = value
            return
        places = (input_ids[0] == POISON).nonzero()[:, 0].tolist()  # one flat batch
        ends = [place + 1 for place in places]  # in `PROMPTS`, the last token follows the poison
        lasts = [t for t in range(input_ids.shape[1]) if input_ids[0, t] == 9]
        for end in ends:
            logits[0, lasts.index(end), 5] = value

    engine = build_engine(milestone, poisoned_model(spoil), max_num_seqs=8)
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=1)
    for name, prompt in PROMPTS.items():
        engine.add_request(prompt, params, name)
    finals = completions(engine)
    assert {n: c.finish_reason for n, c in finals.items()} == {
        name: "error" if POISON in prompt else "length" for name, prompt in PROMPTS.items()
    }
    assert "not finite" in (finals["2"].error or "")
    assert_idle(engine)


@given(
    st.lists(st.sampled_from([0.0, 1.0, -math.inf, math.inf, math.nan]), min_size=8, max_size=8),
    st.booleans(),
)
def test_rows_are_judged_one_by_one(values: list[float], is_greedy: bool) -> None:
    """A row is valid if its largest logit is finite. In any case its token is in the vocabulary."""
    logits = torch.tensor([values, [0.0] * 8])
    requests = [make_request(name, [1]) for name in "ab"]
    for request in requests:
        request.params = SamplingParams(temperature=0.0 if is_greedy else 1.0)
    output = sample(logits, SamplingMetadata.from_requests(requests, "cpu"))
    is_finite = math.isfinite(max(values)) and not any(map(math.isnan, values))
    assert output.is_valid.tolist() == [is_finite, True]
    assert all(0 <= token_id < 8 for token_id in output.token_ids.tolist())
    tokens = [token_id for token_id, _ in output.rows()]
    assert (tokens[0] is None) == (not is_finite) and tokens[1] is not None


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_text_that_cannot_be_processed_ends_its_request(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The other requests get the tokens that they get without the failure."""
    append, calls = OutputText.append, iter(range(1, 10))

    def failing(self: OutputText, token_id: int) -> bool:
        if self.stop and next(calls) == nth:  # only the request "bad" has a stop string
            raise Broken("no text")
        return append(self, token_id)

    monkeypatch.setattr(OutputText, "append", failing)
    engine = make_engine(hash_model())
    engine.add_request([5, 6], greedy(6, ignore_eos=True), "good")
    engine.add_request([7, 8], greedy(6, ignore_eos=True, stop="never"), "bad")
    engine.add_request([9], greedy(6, ignore_eos=True), "other")
    finals = completions(engine)
    assert finals["bad"].finish_reason == "error" and "no text" in (finals["bad"].error or "")
    assert finals["good"].token_ids == expected_tokens([5, 6], 6)
    assert finals["other"].token_ids == expected_tokens([9], 6)


def test_an_abort_works_even_if_the_text_does_not(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputText, "finish", raise_broken)
    engine = make_engine(hash_model())
    engine.add_request([5, 6], greedy(6, ignore_eos=True), "a")
    engine.step()
    assert engine.abort_request("a")
    (final,) = engine.step()
    assert final.outputs[0].finish_reason == "abort"


def test_after_a_failure_in_the_middle_of_a_step_nothing_is_answered(
    milestone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is unknown then, and no answer is better than a wrong one."""
    engine: Any = build_engine(milestone)
    engine.add_request([1, 2], greedy(5), "a")
    monkeypatch.setattr(engine.output_processor, "process", raise_broken)
    with pytest.raises(Broken):
        engine.step()
    for call in (
        engine.step,
        lambda: engine.add_request([1]),
        lambda: engine.abort_request("a"),
        lambda: engine.generate([[1]]),
        lambda: engine.stream([1]),
    ):
        with pytest.raises(EngineDeadError, match=r"make a new one \(Broken: boom\)"):
            call()
    engine.close()
    assert not engine.has_unfinished_requests(), "I3: close drops the requests"


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError])
def test_broken_code_is_no_fault_of_a_request(milestone: str, error: type[Exception]) -> None:
    """The errors of a violated invariant and of an unwritten function reach the caller."""

    def fail(*_: Any) -> None:
        raise error("here")

    engine = build_engine(milestone, poisoned_model(fail))
    engine.add_request([1, POISON], greedy(5), "a")
    with pytest.raises(error, match="here"):
        engine.step()
    if error is AssertionError:
        with pytest.raises(EngineDeadError):
            engine.step()
    engine.close()


@pytest.mark.since("m5_overlap")
def test_an_undone_step_leaves_no_more_than_the_limit(milestone: str) -> None:
    """`a` would have ended in the step that fails. `c`, with a cached prefix, would replace it."""
    left = [99]
    engine = build_engine(milestone, failing_after(left), max_num_seqs=2, page_size=1)
    engine.generate([[7, 7, 7, 7]], greedy(1, ignore_eos=True))
    left[0] = 1  # after the prefill of `a` and `b`
    prompts = {"a": [1, 2], "b": [3, 4, 3], "c": [7, 7, 7, 8]}
    for (name, prompt), max_tokens in zip(prompts.items(), (2, 9, 3), strict=True):
        engine.add_request(prompt, greedy(max_tokens, ignore_eos=True), name)
    finals = completions(engine)
    assert finals["a"].token_ids == expected_tokens(prompts["a"], 2)
    assert finals["b"].token_ids == expected_tokens(prompts["b"], 9)
    assert finals["c"].token_ids == expected_tokens(prompts["c"], 3)
    assert_idle(engine)


def test_the_search_finds_any_causes() -> None:
    """The search finds exactly the requests that always fail, in a bounded number of forwards.

    All others get a token in each search. New requests wait, and each keeps its place.
    """

    @given(st.integers(1, 20), st.integers(1, 20), st.data())
    def check(count: int, width: int, data: st.DataObject) -> None:
        requests = [make_request(f"{i}", [1]) for i in range(count)]
        bad = data.draw(st.sets(st.sampled_from(requests)))
        core, search = searching(requests, width)
        found, forwards, late, late_waits = set(), 0, make_request("late", [1]), None
        while set(core.scheduler.waiting) & bad or search.is_active:
            if search.is_active and late_waits is None:
                core.scheduler.waiting.append(late)
                late_waits = True
            search.prepare()
            late_waits = late_waits and search.is_active
            batch = core.schedule()
            forwards += 1
            assert batch, "I5: no request may be tried"
            assert not (late_waits and late in batch), (
                "a new request must wait until the search ends"
            )
            if set(batch) & bad:
                if (cause := search.failed(batch)) is not None:
                    search.release(cause)
                    core.finish(cause)
                    found.add(cause)
                continue
            for request in batch:
                request.token_ids.append(7)
            search.passed([EngineCoreOutput(request, ((7, None),)) for request in batch])
            if not search.is_active and not bad <= found:  # these go on; the others join
                for request in batch:
                    core.finish(request)
        assert found == bad
        assert forwards <= (len(bad) + 1) * 2 * (math.ceil(math.log2(count)) + 2) * (count + 2)
        left = [*core.scheduler.running, *core.scheduler.waiting]
        assert [r for r in left if r is not late] == [r for r in requests if not r.is_finished]

    check()
