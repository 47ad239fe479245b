"""Serve our workloads with another engine, in its own environment.

    PYTHON serve.py vllm MODEL_FOLDER
    PYTHON serve.py llama MODEL.gguf [--float32]
    PYTHON serve.py openvino MODEL.gguf [--float32]
    PYTHON serve.py onnx MODEL_FOLDER
    PYTHON serve.py nano MODEL_FOLDER --path CHECKOUT
    PYTHON serve.py mini MODEL_FOLDER --path CHECKOUT/python

The environment has the engine, and needs nothing of this project. For each workload, a line of JSON
on standard input, the script writes the results as a line of JSON. vLLM takes minutes to start, so
it starts once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

MAX_MODEL_LEN = 2304  # the longest prompt of a workload has 2,048 tokens
MAX_NUM_SEQS = 16

Json = dict[str, Any]
Serve = Callable[[Json], Json]


class Engine(Protocol):
    """An engine that computes one step at a time."""

    def add_request(self, name: str, prompt: list[int], max_tokens: int, workload: Json) -> None:
        """Add a request that ends after `max_tokens` tokens."""

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        """Return for each request with new tokens: its name, these tokens, whether it has ended."""


def users_of(workload: Json) -> list[tuple[list[int], int, float, list[list[int]]]]:
    """Return the first prompt, the output tokens, the arrival and the later words of each user."""
    count = len(workload["prompts"])
    arrivals = workload["arrivals"] or [0.0] * count
    to_say = [list(user) for user in workload["follow_ups"]] or [[] for _ in range(count)]
    return list(zip(workload["prompts"], workload["max_tokens"], arrivals, to_say, strict=True))


def result(
    started: float, tokens: list[list[int]], times: list[list[float]], dues: list[float]
) -> Json:
    """Return the results of requests: their output tokens, and the seconds since the start."""
    return {
        "token_ids": tokens,
        "seconds": time.perf_counter() - started,
        "first_token_seconds": [each[0] - due for each, due in zip(times, dues, strict=True)],
        "inter_token_seconds": [b - a for each in times for a, b in pairwise(each)],
    }


def serve_in_steps(engine: Engine, workload: Json) -> Json:
    """Serve a workload as the driver of `common/displays/workload.py` does."""
    first, most, arrivals, to_say = zip(*users_of(workload), strict=True)
    due, prompts = list(arrivals), [[prompt] for prompt in first]  # for each user, turn by turn
    coming, users = list(range(len(due))), dict[str, int]()
    tokens, times, requested = dict[str, list[int]](), dict[str, list[float]](), dict[str, float]()
    started = time.perf_counter()
    while coming or users:
        now = time.perf_counter() - started
        if not users:
            time.sleep(max(0.0, min(due[user] for user in coming) - now))
            now = max(now, min(due[user] for user in coming))
        for user in [user for user in coming if due[user] <= now]:
            name = f"{started}-{user}-{len(prompts[user])}"
            engine.add_request(name, prompts[user][-1], most[user], workload)
            users[name], requested[name], tokens[name], times[name] = user, due[user], [], []
            coming.remove(user)
        for name, new, has_ended in engine.step():
            now = time.perf_counter() - started
            times[name] += [now] * len(new)
            tokens[name] += new
            if has_ended:
                user = users.pop(name)
                if to_say[user]:
                    prompts[user].append(prompts[user][-1] + tokens[name] + to_say[user].pop(0))
                    due[user] = now
                    coming.append(user)
    return result(started, [*tokens.values()], [*times.values()], [*requested.values()])


def serve_at_once(generate: Callable[..., Any], sampling_params: Callable[..., Any]) -> Serve:
    """Return how an engine serves requests that all come at the start, in one call of `generate`.

    sampling_params: the engine's class of this name.
    """

    def serve(workload: Json) -> Json:
        if workload["arrivals"] or workload["follow_ups"]:
            raise ValueError("this engine serves all requests at once")
        kind = {name: workload[name] for name in ("temperature", "ignore_eos")}
        params = [sampling_params(max_tokens=most, **kind) for most in workload["max_tokens"]]
        started = time.perf_counter()
        outputs = generate(workload["prompts"], params)
        ended = time.perf_counter() - started
        tokens = [list(output["token_ids"]) for output in outputs]
        return result(started, tokens, [[ended] for _ in tokens], [0.0] * len(tokens))

    return serve


def main() -> None:
    """Start the engine, then answer each line of standard input with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # these engines print to standard output: keep that out of the answers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the folder is removed
    sys.path.insert(0, str(Path(__file__).parents[1]))
    start = importlib.import_module(f"peers.with_{sys.argv[1]}").start
    del sys.path[0]  # the engine must not find our other files
    if "--path" in sys.argv:
        sys.path.insert(0, sys.argv[sys.argv.index("--path") + 1])
    with tempfile.TemporaryDirectory() as folder:
        serve = start(sys.argv[2], folder, float32="--float32" in sys.argv)
        for line in sys.stdin:
            answers.write(json.dumps(serve(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
