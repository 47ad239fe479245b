"""llama.cpp: xllamacpp, which is its server as a Python module, and gguf.

With `--float32`, the weights are first unpacked to float32. Without it, llama.cpp reads them as
they are stored, and rounds the activations to 8 bits where it multiplies with quantized weights.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from .serve import MAX_MODEL_LEN, MAX_NUM_SEQS, Json, Serve, result, users_of


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


def start(model: str, folder: str, float32: bool) -> Serve:
    """Start llama.cpp on a file. folder: for the file with float32 weights."""
    import xllamacpp

    if float32:
        source, model = Path(model), str(Path(folder) / "float32.gguf")
        unpacked(source, Path(model))
    params = xllamacpp.CommonParams()
    params.model.path, params.verbosity = model, 0
    params.n_parallel, params.n_ctx = MAX_NUM_SEQS, MAX_NUM_SEQS * MAX_MODEL_LEN
    params.cont_batching, params.n_batch, params.n_ubatch = True, 2048, 512
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    server = xllamacpp.Server(params)
    return lambda workload: serve_with_llama(server, workload)
