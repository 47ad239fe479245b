"""Record the runs that `figures_ladder` draws: the same requests on every milestone.

Eight chats arrive over time. They have the same system prompt. Each milestone serves them in a
process of its own, under a `Trace`, after a warm-up. Other processes of the machine
would make one milestone look slower than another. So a run begins when the machine is quiet, and it
is repeated if other processes used the CPU. The file keeps the median run of each milestone.
Linux only.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from common import EMBEDDED_MODEL, EngineConfig, LLMEngine
from common.displays.demo import CHATS, machine
from common.displays.workload import Workload, run
from common.tracing.data import TraceData
from common.tracing.trace import Trace

from ...chain import ROOT, at_least, milestones
from ...recording import write

FILE = ROOT / "milestones" / "docs" / "results" / "ladder_runs.json"
CHUNK = 128  # tokens of a step, from m3 on. A step of m2 computes whole prompts.
RUNS = 3  # of each milestone
QUIET = 0.05  # other processes may use this share of the machine's CPU time
NUM_REQUESTS = 8
SECONDS_APART = 0.25
MAX_TOKENS = 48
SYSTEM_PROMPT = """
You are the assistant of a course about engines that serve large language models. Answer in two or
three plain sentences. Most of the students are not native speakers of English, so use short
sentences and no slang. If you do not know an answer, say so. These are the terms of the course.
A request is a prompt and the parameters of its answer. A step is one forward pass of the model for
a batch of requests. Prefill computes all tokens of a prompt. Decode computes one token of each
running request. The KV cache stores the keys and the values of all tokens that were computed, so
that no step computes them again. A slot is the place of one token in the KV cache. A page is a
block of slots, and a page table lists the pages of a request in order. The scheduler chooses the
requests of a step, and the number of tokens of each. Continuous batching means that a request can
join or leave the batch in every step. Chunked prefill divides a long prompt into parts, so that the
other requests continue to get tokens. A retraction frees the memory of a running request, which
starts again later. Two prompts with the same beginning share a prefix. The radix tree finds the
longest prefix that is in the cache, and a lock protects it while a request reads it. Eviction frees
the pages that were not used for the longest time. Overlap means that the CPU plans the next step
while the accelerator computes the current one. A future token is a token that a step will produce,
and that the next step uses before the CPU has seen it. A CUDA graph starts all kernels of a step
with one call. Throughput is the number of output tokens per second. Latency is the time that one
request takes. The time to the first token includes the time in the queue.
"""

T = TypeVar("T")


@dataclass
class Lane:
    """The run of one milestone. Lists have one entry for each request; times are in seconds.

    steps: a row for each forward: its beginning, its end, and the number of tokens of each request.
    others: the share of the machine's CPU time that other processes used.
    """

    prompt_tokens: list[int]
    cached_tokens: list[int]
    ends: list[float]
    token_ids: list[list[int]]
    steps: list[list[float]]
    others: float

    @property
    def seconds(self) -> float:
        """Return the time at which the last request ended."""
        return max(self.ends)

    def forwards(self, request: int) -> list[tuple[int, bool]]:
        """Return the indices of the steps that computed a request, and whether each is prefill."""
        tokens = [int(step[2 + request]) for step in self.steps]
        before = [0, *accumulate(tokens)]
        prefill = self.prompt_tokens[request] - self.cached_tokens[request]
        return [(i, before[i] < prefill) for i, count in enumerate(tokens) if count]


@dataclass
class Recording:
    """The median run of each milestone, and what is common to all of them.

    seconds: of all quiet runs of each milestone.
    """

    machine: str
    date: str
    model: str
    chunk: int
    arrivals: list[float]
    seconds: dict[str, list[float]]
    lanes: dict[str, Lane]


def load() -> Recording:
    """Return the recording that is in the repository."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    lanes = {milestone: Lane(**lane) for milestone, lane in document.pop("lanes").items()}
    return Recording(**document, lanes=lanes)


def record() -> None:
    """Run all milestones, and write the median run of each.

    Raises `RuntimeError` if a milestone fails, or if two milestones give different tokens.
    """
    runs = {milestone: _in_process(milestone) for milestone in milestones()}
    write(FILE, asdict(recording_of(runs)))


def recording_of(runs: dict[str, list[Lane]]) -> Recording:
    """Return the median run of each milestone. All runs must have the same tokens (I1)."""
    if len({json.dumps(lane.token_ids) for lanes in runs.values() for lane in lanes}) != 1:
        raise RuntimeError("I1: the milestones must give the same tokens for each request")
    ranked = {name: sorted(lanes, key=lambda lane: lane.seconds) for name, lanes in runs.items()}
    return Recording(
        machine(), date.today().isoformat(), EMBEDDED_MODEL, CHUNK, arrivals(),
        {name: [lane.seconds for lane in lanes] for name, lanes in ranked.items()},
        {name: lanes[(len(lanes) - 1) // 2] for name, lanes in ranked.items()},
    )  # fmt: skip


def arrivals() -> list[float]:
    """Return the seconds at which the chats arrive."""
    return [SECONDS_APART * i for i in range(NUM_REQUESTS)]


def _in_process(milestone: str) -> list[Lane]:
    """Run a milestone in a new process, so that no engine inherits memory from another one."""
    command = [sys.executable, "-m", "milestones.staff.maintain.ladder_runs", milestone]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{milestone} failed:\n{done.stderr[-2000:]}")
    return [Lane(**lane) for lane in json.loads(done.stdout)]


def serve(milestone: str) -> list[Lane]:
    """Serve the requests on a milestone, after a warm-up, until there are `RUNS` quiet runs."""
    most = CHUNK if at_least(milestone, "m3_paged") else EngineConfig().max_num_batched_tokens
    config = EngineConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=most, seed=0)
    lanes: list[Lane] = []
    with importlib.import_module(milestone).LLMEngine(config) as engine:
        workload = requests(engine)
        run(engine, workload.warm_up())  # the first forwards of a process are slow
        while len(lanes) < RUNS:
            engine.reset_prefix_cache()
            while used_by_others(lambda: time.sleep(1))[1] > QUIET:
                pass
            lane, others = used_by_others(lambda: serve_once(engine, workload))
            if others <= QUIET:
                lanes.append(replace(lane, others=round(others, 4)))
    return lanes


def serve_once(engine: LLMEngine, workload: Workload) -> Lane:
    """Serve the requests on an idle engine, and return the lane."""
    with Trace(engine) as trace:
        result = run(engine, workload)
    return lane_of(trace.data, result.token_ids)


def used_by_others(action: Callable[[], T]) -> tuple[T, float]:
    """Return the result of an action, and the share of the CPU time that other processes used."""

    def now() -> tuple[float, float]:
        ticks = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, *rest = map(int, ticks)
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
        return busy - time.process_time(), time.perf_counter()

    before, started = now()
    result = action()
    after, ended = now()
    return result, (after - before) / (ended - started) / (os.cpu_count() or 1)


def requests(engine: LLMEngine) -> Workload:
    """Return the chats: the system prompt and one question each, one chat every 250 ms."""
    system = {"role": "system", "content": " ".join(SYSTEM_PROMPT.split())}
    prompts = []
    for question in CHATS[:NUM_REQUESTS]:
        talk = [system, {"role": "user", "content": question}]
        prompts.append(list(engine.input_processor.apply_chat_template(talk).prompt_token_ids))
    return Workload(prompts, [MAX_TOKENS] * NUM_REQUESTS, arrivals=arrivals())


def lane_of(trace: TraceData, token_ids: list[list[int]]) -> Lane:
    """Return what a picture needs of a trace. Times are relative to the start of the trace."""
    cached: dict[int, int] = {}
    for frame in trace.frames:
        cached |= {
            i: change["cached"] for i, change in frame.requests.items() if "cached" in change
        }
    batches = [batch for frame in trace.frames for batch in frame.batches]
    numbers = range(len(trace.requests))
    return Lane(
        prompt_tokens=[info.num_prompt_tokens for info in trace.requests],
        cached_tokens=[cached.get(i, 0) for i in numbers],
        ends=[round((info.end or 0.0) - trace.origin, 4) for info in trace.requests],
        token_ids=token_ids,
        steps=[
            [round(span.start - trace.origin, 4), round(span.end - trace.origin, 4),
             *(batch.get(i, 0) for i in numbers)]
            for batch, span in zip(batches, trace.forwards, strict=True)
        ],
        others=0.0,
    )  # fmt: skip


if __name__ == "__main__":
    json.dump([asdict(lane) for lane in serve(sys.argv[1])], sys.stdout)
