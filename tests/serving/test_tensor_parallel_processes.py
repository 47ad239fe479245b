"""Tensor parallelism with real processes: how they end, and tests of m5 on an engine of two ranks.

The tests that are imported at the end run on the divided model here. They run on the whole model in
their own files.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from common import EngineConfig, EngineDeadError, LoadedModel, load_model
from common.parallel import group, ranks
from common.parallel.ranks import RankError
from milestones.chain import electives
from tests import conftest
from tests.conftest import ROOT, EngineFactory, build_engine
from tests.engine.test_paged import test_no_position_is_padding
from tests.engine.test_parallel_sampling import test_an_output_has_n_different_answers
from tests.engine.test_radix import (
    test_equal_pages_are_adopted,
    test_the_next_turn_reuses_the_answer,
)
from tests.helpers.oracle import assert_one_answer, greedy
from tests.invariants.test_i1_one_answer import (
    test_logprobs_are_the_models_own,
    test_requests_that_join_late_equal_generate,
    test_stop_token_ids_stop,
)
from tests.invariants.test_i2_batch_invariance import (
    test_a_seed_is_a_text,
    test_greedy_rows_do_not_notice_sampling_neighbours,
)
from tests.invariants.test_i3_nothing_leaks import (
    test_a_stream_left_early_is_aborted,
    test_abort_says_whether_it_ended_something,
    test_what_is_cached_can_be_forgotten,
)
from tests.invariants.test_i6_text import test_streamed_pieces_join

pytestmark = [
    pytest.mark.thorough("each test starts processes that import torch"),
    pytest.mark.since("m5_overlap"),
    pytest.mark.before(*electives()),
]

AT_ONCE = 10.0  # seconds, on a busy machine
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
LOOPBACK = "0100007F"
SUITE = [
    test_logprobs_are_the_models_own,
    test_requests_that_join_late_equal_generate,
    test_stop_token_ids_stop,
    test_a_seed_is_a_text,
    test_greedy_rows_do_not_notice_sampling_neighbours,
    test_a_stream_left_early_is_aborted,
    test_abort_says_whether_it_ended_something,
    test_what_is_cached_can_be_forgotten,
    test_streamed_pieces_join,
    test_no_position_is_padding,
    test_an_output_has_n_different_answers,
    test_equal_pages_are_adopted,
    test_the_next_turn_reuses_the_answer,
]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LoadedModel]:
    loaded = divided()
    yield loaded
    loaded.close()


def divided() -> LoadedModel:
    return load_model(EngineConfig(model="tiny-llama", device="cpu", tensor_parallel_size=2))


@pytest.fixture(autouse=True)
def on_two_ranks(
    request: pytest.FixtureRequest, two_ranks: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the engines of the imported tests with the divided model."""
    whole = conftest.shared_model
    monkeypatch.setattr(
        conftest, "shared_model", lambda name: two_ranks if name == "tiny-llama" else whole(name)
    )


def process_of(loaded: LoadedModel) -> subprocess.Popen[bytes]:
    """Return the process of rank 1."""
    assert loaded.ranks is not None
    (process,) = loaded.ranks.workers.processes
    assert isinstance(process, subprocess.Popen)
    return process


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")


def listening(pid: int) -> list[str]:
    """Return the local addresses at which a process listens, in hexadecimal."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="utf-8").splitlines()[1:]
    ]
    return [line[1].split(":")[0] for line in lines if line[3] == LISTENS and line[9] in inodes]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_the_loopback_only(milestone: str, two_ranks: LoadedModel) -> None:
    for pid in (os.getpid(), process_of(two_ranks).pid):
        addresses = listening(pid)
        assert addresses and {*addresses} == {LOOPBACK}


def test_retracted_requests_are_computed_again(milestone: str, two_ranks: LoadedModel) -> None:
    """The pool is too small for all requests. Pages of a retracted request go to others."""
    engine = build_engine(milestone, two_ranks, num_pages=10, page_size=4, max_model_len=40)
    for output in engine.generate([[1, 2, 3], [4, 5], [6], [7, 8]], greedy(24)):
        assert_one_answer("tiny-llama", output, 24)
    assert engine.stats().num_retractions > 0
    engine.close()


def test_a_killed_rank_ends_the_engine(milestone: str) -> None:
    """The step in flight fails at once. So do all later calls, and no process is left."""
    loaded = divided()
    process = process_of(loaded)
    engine = build_engine(milestone, loaded)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add_request(prompt, greedy(400, ignore_eos=True))
    for _ in range(5):
        engine.step()
    process.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 has ended"):
        while True:
            engine.step()
    with pytest.raises(EngineDeadError):
        engine.add_request([1], greedy(1))
    engine.close()
    loaded.close()
    assert time.monotonic() - started < AT_ONCE
    assert process.poll() is not None
    assert loaded.ranks is not None
    assert not Path(loaded.ranks.workers.rendezvous).parent.exists(), "a folder is left"


def test_a_rank_that_hangs_ends_the_engine(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive, and its connections are open. The timeout of a collective operation ends it."""
    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(group, "ENDING_SECONDS", 0.5)
    loaded = divided()
    process = process_of(loaded)
    engine = build_engine(milestone, loaded)
    engine.generate([[1, 2, 3]], greedy(2))
    engine.add_request([4, 5], greedy(400, ignore_eos=True))
    engine.step()
    process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    guard = threading.Timer(AT_ONCE, process.kill)  # without a timeout, the test must end too
    guard.start()
    with pytest.raises(RankError, match="failed on rank 0: .*[Tt]imed out"):
        while True:
            engine.step()
    guard.cancel()
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.close()
    loaded.close()
    assert time.monotonic() - started < AT_ONCE
    assert process.poll() == -signal.SIGKILL


SCRIPT = """
import time
from common import EngineConfig, SamplingParams
from m5_overlap import LLMEngine

engine = LLMEngine(EngineConfig(model="tiny-llama", device="cpu", tensor_parallel_size=2))
print(engine.loaded.ranks.workers.processes[0].pid, flush=True)
try:
    while True:
        engine.generate([1, 2, 3], SamplingParams(max_tokens=300, ignore_eos=True))
except KeyboardInterrupt:
    outputs = engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    print(len(outputs[0].outputs[0].token_ids), flush=True)
time.sleep(600)
"""


def test_an_interrupt_and_the_end_of_rank_0(milestone: str) -> None:
    """Ctrl-C reaches rank 0 only, and the engine goes on. SIGKILL of rank 0 ends all ranks."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        rank_1 = int(process.stdout.readline())
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert int(process.stdout.readline()) == 4
        assert is_running(rank_1)
        process.kill()
    deadline = time.monotonic() + AT_ONCE
    while is_running(rank_1):
        assert time.monotonic() < deadline, "rank 1 is left"
        time.sleep(0.05)


def test_log_probabilities_of_prompts_are_refused(make_engine: EngineFactory) -> None:
    """The ranks have parts of the head, and rank 0 cannot run it alone."""
    with pytest.raises(ValueError, match="prompt_logprobs: they need tensor_parallel_size=1"):
        make_engine().add_request([1, 2], greedy(1, prompt_logprobs=0))
