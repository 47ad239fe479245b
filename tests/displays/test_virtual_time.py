"""In virtual time, a run takes what the step model says, whatever the machine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common import EngineConfig, LLMEngine
from common.clock import StepCosts, VirtualClock
from common.displays.workload import Workload, WorkloadResult, run
from common.tracing.trace import Trace
from common.virtual_time import VirtualStream, use_virtual_time
from milestones.lab.instruments.audit import STREAMS, audited_engine_class
from milestones.lab.instruments.streams import EarlyStream
from tests.conftest import EngineFactory, shared_model

PROMPTS = [[50 + i] * (3 + 2 * i) for i in range(4)]
WORKLOAD = Workload(PROMPTS, [5, 9, 7, 4], ignore_eos=True, arrivals=[0.0, 0.0, 0.02, 0.5])
CONFIG: dict[str, Any] = {"max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 64}
COSTS = StepCosts(host=1.0, host_row=0.5, forward=4.0, forward_token=0.25)


def virtual_run(engine: LLMEngine, workload: Workload = WORKLOAD) -> WorkloadResult:
    use_virtual_time(engine, COSTS)
    return run(engine, workload)


@pytest.mark.electives
def test_a_run_takes_the_same_time_and_gives_the_same_tokens(make_engine: EngineFactory) -> None:
    expected = run(make_engine(**CONFIG), WORKLOAD).token_ids
    first, second = (virtual_run(make_engine(**CONFIG)) for _ in range(2))
    assert first == second
    assert first.token_ids == expected


@pytest.mark.before("m5_overlap")
def test_a_step_is_the_host_and_then_the_forward(make_engine: EngineFactory) -> None:
    result = virtual_run(make_engine(**CONFIG), Workload(PROMPTS[:1], [3], ignore_eos=True))
    assert result.forward_seconds == pytest.approx([0.00475, 0.00425, 0.00425])
    assert result.gap_seconds == pytest.approx([0.0015, 0.0015])
    assert result.seconds == pytest.approx(3 * 0.0015 + sum(result.forward_seconds))
    assert result.first_token_seconds[0] == pytest.approx(0.0015 + 0.00475)


def test_work_that_waits_for_another_stream_begins_later() -> None:
    """The host does not wait with it."""
    clock = VirtualClock(StepCosts())
    first, second = (VirtualStream(EarlyStream(), torch.nn.Identity(), clock) for _ in range(2))
    copied = first.launch(lambda: clock.charge(2.0))

    def compute() -> None:
        copied.wait()
        clock.charge(1.0)

    computed = second.launch(compute)
    assert clock.now() == 0.0
    computed.wait()
    assert clock.now() == 3.0


@pytest.mark.since("m5_overlap")
@pytest.mark.electives
def test_the_moment_when_the_real_work_runs_does_not_matter(milestone: str) -> None:
    """Also with little memory, where an elective copies pages on a stream of their own."""
    small = {**CONFIG, "num_pages": 9, "max_model_len": 32}
    loaded, config = shared_model("tiny-llama"), EngineConfig(model="tiny-llama", **small)
    modes = ("overlap", *STREAMS)
    engines = [audited_engine_class(milestone, mode)(config, loaded) for mode in modes]
    workload = Workload(PROMPTS, [12] * 4, ignore_eos=True)
    first, *others = (virtual_run(engine, workload) for engine in engines)
    assert others == [first] * len(STREAMS)


@pytest.mark.since("m5_overlap")
def test_overlap_hides_the_host(milestone: str, make_engine: EngineFactory) -> None:
    workload = Workload(PROMPTS, [9] * 4, ignore_eos=True)
    serial = virtual_run(make_engine(**CONFIG, enable_overlap=False), workload)
    overlapped = virtual_run(make_engine(**CONFIG, enable_overlap=True), workload)
    assert serial.token_ids == overlapped.token_ids
    assert serial.forward_seconds == pytest.approx(overlapped.forward_seconds)
    assert serial.gap_seconds == pytest.approx([0.003] * (len(serial.forward_seconds) - 1))
    if milestone == "m5_overlap":  # some electives cannot plan every step ahead
        assert overlapped.gap_seconds == pytest.approx([0.0] * len(serial.gap_seconds))
    assert overlapped.seconds <= serial.seconds


@pytest.mark.before("disaggregated")  # its lane is that of the decode side
def test_padding_counts(make_engine: EngineFactory) -> None:
    """A forward is charged for the positions that it computes."""
    result = virtual_run(make_engine(**CONFIG), Workload(PROMPTS, [1] * 4, ignore_eos=True))
    positions = sum((s - 0.004) / 0.00025 for s in result.forward_seconds)
    stats = result.stats
    computed = stats["prefill_tokens"] + stats["decode_tokens"] + stats["padding_tokens"]
    assert positions == pytest.approx(computed)


def test_the_lanes_of_a_trace_are_in_virtual_time(make_engine: EngineFactory) -> None:
    engine = make_engine(**CONFIG)
    clock = use_virtual_time(engine, COSTS)
    with Trace(engine) as trace:
        result = run(engine, WORKLOAD)
    forwards = [(span.start, span.end) for span in trace.data.forwards]
    assert [end - start for start, end in forwards] == pytest.approx(result.forward_seconds)
    assert all(0 <= start < end <= clock.now() for start, end in forwards)
    assert [r.arrival for r in trace.data.requests] == pytest.approx(
        [0.0, 0.0, 0.02, 0.5], abs=0.02
    )
    assert max(span.end for span in trace.data.spans) == clock.now()
