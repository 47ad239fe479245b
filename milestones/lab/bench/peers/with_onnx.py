"""ONNX Runtime GenAI, on the weights in a folder, one request after the other.

Its continuous batching is for GPUs. Its builder converts the model: it rounds the weights to 4 bits
again, which gives other numbers, and at run time it rounds activations to 8 bits. Its environment
also needs torch, transformers, onnx and onnx-ir, for the builder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .serve import Json, Serve, result, users_of

BUILDER = "onnxruntime_genai.models.builder"


def start(model: str, folder: str, float32: bool) -> Serve:
    """Convert the model, which takes some seconds, and load it. folder: for the converted model."""
    import onnxruntime_genai

    target = Path(folder) / "model"
    target.mkdir()
    options = ("-i", model, "-o", str(target), "-p", "int4", "-e", "cpu", "-c", folder)
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", BUILDER, *options], check=True, env=offline)
    loaded = onnxruntime_genai.Model(str(target))
    return lambda workload: serve_one_by_one(loaded, workload)


def generate(model: Any, prompt: list[int], most: int, workload: Json) -> Iterator[int]:
    """Compute the tokens of one request."""
    import numpy as np
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    length = len(prompt) + most
    params.set_search_options(
        max_length=length, min_length=length if workload["ignore_eos"] else 0,
        do_sample=workload["temperature"] > 0, temperature=workload["temperature"] or 1.0,
    )  # fmt: skip
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
        yield int(generator.get_next_tokens()[0])


def serve_one_by_one(model: Any, workload: Json) -> Json:
    """Serve each user's turns when they are due or, if another one runs, after it."""
    started = time.perf_counter()
    tokens: list[list[int]] = []
    times: list[list[float]] = []
    dues: list[float] = []
    for prompt, most, arrival, to_say in users_of(workload):
        due = arrival
        for said in [*to_say, None]:
            time.sleep(max(0.0, started + due - time.perf_counter()))
            dues.append(due)
            times.append([])
            tokens.append([])
            for token in generate(model, prompt, most, workload):
                tokens[-1].append(token)
                times[-1].append(time.perf_counter() - started)
            if said is not None:
                prompt, due = prompt + tokens[-1] + said, times[-1][-1]
    return result(started, tokens, times, dues)
