"""Serve our workloads with llama.cpp, in its own environment: `PYTHON peer_llama.py MODEL.gguf`.

With `--float32`, the weights are first unpacked to float32. Without it, llama.cpp reads them as
they are stored, and rounds the activations to 8 bits where it multiplies with quantized weights.

The environment needs `xllamacpp` (the server of llama.cpp as a Python module) and `gguf`, and
nothing of this project. For each workload, a line of JSON on standard input, the script writes the
results as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

MAX_MODEL_LEN, MAX_NUM_SEQS = 2048, 16


class User(threading.Thread):
    """A client that sends its requests, turn by turn, and records when tokens arrive."""

    def __init__(
        self, server: Any, prompt: list[int], max_tokens: int, due: float, to_say: list[list[int]],
        ignore_eos: bool, started: float, temperature: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.server, self.prompt, self.max_tokens, self.due = server, prompt, max_tokens, due
        self.to_say, self.ignore_eos, self.started = to_say, ignore_eos, started
        self.temperature = temperature
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
                "ignore_eos": self.ignore_eos, "cache_prompt": True, "verbose": True,
                "temperature": self.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
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


def serve(server: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """Serve all users at the same time, one thread each. Raises `RuntimeError` on a refusal."""
    count, started = len(workload["prompts"]), time.perf_counter()
    users = [
        User(
            server,
            prompt,
            max_tokens,
            due,
            to_say,
            workload["ignore_eos"],
            started,
            workload["temperature"],
        )
        for prompt, max_tokens, due, to_say in zip(
            workload["prompts"],
            workload["max_tokens"],
            workload["arrivals"] or [0.0] * count,
            workload["follow_ups"] or [[] for _ in range(count)],
            strict=True,
        )
    ]
    for user in users:
        user.start()
    for user in users:
        user.join()
    if failures := [user.failure for user in users if user.failure is not None]:
        raise RuntimeError(failures[0])
    turns = [turn for user in users for turn in zip(user.times, user.dues, strict=True)]
    return {
        "token_ids": [tokens for user in users for tokens in user.tokens],
        "seconds": time.perf_counter() - started,
        "first_token_seconds": [times[0] - due for times, due in turns],
        "inter_token_seconds": [b - a for times, _ in turns for a, b in pairwise(times)],
    }


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


def main() -> None:
    """Start the server, then answer each line of standard input with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to standard output: keep that out of the answers
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        model = Path(sys.argv[1])
        if "--float32" in sys.argv:
            model = Path(folder) / "float32.gguf"
            unpacked(Path(sys.argv[1]), model)
        params = xllamacpp.CommonParams()
        params.model.path, params.verbosity = str(model), 0
        params.n_parallel, params.n_ctx = MAX_NUM_SEQS, MAX_NUM_SEQS * MAX_MODEL_LEN
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        server = xllamacpp.Server(params)
        for line in sys.stdin:
            answers.write(json.dumps(serve(server, json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
