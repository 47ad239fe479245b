"""Serve our workloads with vLLM or llama.cpp, in their own environment.

    PYTHON piped.py vllm MODEL_FOLDER
    PYTHON piped.py llama MODEL.gguf [--float32]

The environment has vllm, or xllamacpp (the server of llama.cpp as a Python module) and gguf, and
needs nothing of this project. For each workload, a line of JSON on standard input, the script
writes the results as a line of JSON. vLLM takes minutes to start, so it starts once.

With `--float32`, the weights are first unpacked to float32. Without it, llama.cpp reads them as
they are stored, and rounds the activations to 8 bits where it multiplies with quantized weights.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 16

Json = dict[str, Any]
Serve = Callable[[Json], Json]


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


def serve_with_vllm(engine: Any, workload: Json) -> Json:
    """Serve a workload as the driver of `common/displays/workload.py` does, with vLLM's engine."""
    from vllm import SamplingParams

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
            params = SamplingParams(
                temperature=workload["temperature"], max_tokens=most[user],
                ignore_eos=workload["ignore_eos"], detokenize=False,
            )  # fmt: skip
            engine.add_request(name, {"prompt_token_ids": prompts[user][-1]}, params)
            users[name], requested[name], tokens[name], times[name] = user, due[user], [], []
            coming.remove(user)
        for output in engine.step():
            name, now = output.request_id, time.perf_counter() - started
            new = list(output.outputs[0].token_ids)
            times[name] += [now] * (len(new) - len(tokens[name]))
            tokens[name] = new
            if output.finished:
                user = users.pop(name)
                if to_say[user]:
                    prompts[user].append(prompts[user][-1] + new + to_say[user].pop(0))
                    due[user] = now
                    coming.append(user)
    return result(started, [*tokens.values()], [*times.values()], [*requested.values()])


class User(threading.Thread):
    """A client of llama.cpp: sends its requests, turn by turn, and records when tokens arrive."""

    def __init__(self, server: Any, workload: Json, started: float, *user: Any) -> None:
        super().__init__()
        self.server, self.workload, self.started = server, workload, started
        self.prompt, self.max_tokens, self.due, self.to_say = user
        self.tokens: list[list[int]] = []  # the output tokens of each turn
        self.times: list[list[float]] = []
        self.dues: list[float] = []
        self.failure: str | None = None

    def run(self) -> None:
        time.sleep(max(0.0, self.started + self.due - time.perf_counter()))
        prompt, due = self.prompt, self.due
        for said in [*self.to_say, None]:
            self.tokens.append([])
            self.times.append([])
            self.dues.append(due)
            request = {
                "prompt": prompt, "n_predict": self.max_tokens, "stream": True,
                "ignore_eos": self.workload["ignore_eos"], "cache_prompt": True, "verbose": True,
                "temperature": self.workload["temperature"],
                "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            }  # fmt: skip
            self.server.handle_completions(request, self.take)
            if self.failure is not None or said is None:
                return
            prompt, due = prompt + self.tokens[-1] + said, self.times[-1][-1]

    def take(self, chunk: Any) -> None:
        """Take a piece of an answer. The server does not report the ids of tokens that end inside a
        character, so they count as token 0."""
        told = chunk.get("__verbose")
        if told is None:
            self.failure = json.dumps(chunk)
            return
        missing = told["tokens_predicted"] - len(self.tokens[-1])
        new = told["tokens"][-missing:] if missing > 0 else []
        now = time.perf_counter() - self.started
        self.tokens[-1] += [0] * (missing - len(new)) + new
        self.times[-1] += [now] * missing


def serve_with_llama(server: Any, workload: Json) -> Json:
    """Serve all users at the same time, one thread each. Raises `RuntimeError` on a refusal."""
    started = time.perf_counter()
    users = [User(server, workload, started, *user) for user in users_of(workload)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    if failures := [user.failure for user in users if user.failure is not None]:
        raise RuntimeError(failures[0])
    turns = [turn for u in users for turn in zip(u.tokens, u.times, u.dues, strict=True)]
    return result(started, *([*column] for column in zip(*turns, strict=True)))


def unpacked(source: Path, target: Path) -> None:
    """Write the same model with float32 weights to `target`."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, weights.reshape(shape), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start_vllm(model: str, _folder: str) -> Serve:
    """Start vLLM on the weights in a folder."""
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()  # as our engines: `EngineConfig` and `workloads.py`
    llm = LLM(
        model, dtype="auto" if on_gpu else "float32", max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256 if on_gpu else MAX_NUM_SEQS, seed=0, enable_prefix_caching=True,
    )  # fmt: skip

    def serve(workload: Json) -> Json:
        served = serve_with_vllm(llm.llm_engine, workload)
        llm.reset_prefix_cache()  # the next round sends the same prompts
        return served

    return serve


def start_llama(model: str, folder: str) -> Serve:
    """Start llama.cpp on a file. folder: for the file with float32 weights."""
    import xllamacpp

    if "--float32" in sys.argv:
        source, model = Path(model), str(Path(folder) / "float32.gguf")
        unpacked(source, Path(model))
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = model, 0
    params.n_parallel, params.n_ctx = MAX_NUM_SEQS, MAX_NUM_SEQS * MAX_MODEL_LEN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)
    return lambda workload: serve_with_llama(server, workload)


def main() -> None:
    """Start the engine, then answer each line of standard input with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # these engines print to standard output: keep that out of the answers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the folder is removed
    start = {"vllm": start_vllm, "llama": start_llama}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        serve = start(sys.argv[2], folder)
        for line in sys.stdin:
            answers.write(json.dumps(serve(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
