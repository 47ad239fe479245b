"""OpenVINO GenAI: its continuous batching, on a `.gguf` file.

It turns weights of Q4_1 into 4 bits with an integer for zero, so its numbers are near ours, not
equal. By default it keeps keys and values in 8 bits, rounds activations to 8 bits, and computes the
rest in bfloat16 on a CPU that can. With `--float32`, everything but the weights is in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .serve import MAX_NUM_SEQS, Json, Serve, serve_in_steps

CACHE_GB = 2
FLOAT32 = {
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}  # fmt: skip


class Engine:
    """A `ContinuousBatchingPipeline`, without text."""

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.handles: dict[str, Any] = {}
        self.left: dict[str, int] = {}  # tokens until a request ends

    def add_request(self, name: str, prompt: list[int], max_tokens: int, workload: Json) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = max_tokens, workload["ignore_eos"]
        config.do_sample = workload["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_k, config.top_p = workload["temperature"], 0, 1.0
        ids, number = openvino.Tensor(np.array([prompt], np.int64)), len(self.left)
        self.handles[name] = self.pipeline.add_request(number, ids, config)
        self.left[name] = max_tokens

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        self.pipeline.step()
        for name in [name for name, handle in self.handles.items() if handle.can_read()]:
            [output] = self.handles[name].read().values()
            new = list(output.generated_ids)
            self.left[name] -= len(new)
            has_ended = self.left[name] == 0  # the workloads ignore the token that ends a text
            if has_ended:
                del self.handles[name]
            yield name, new, has_ended


def start(model: str, _folder: str, float32: bool) -> Serve:
    """Start OpenVINO GenAI on a file. All cores compute: by default it leaves out half of two."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, MAX_NUM_SEQS
    scheduler.enable_prefix_caching = True
    cores = {"INFERENCE_NUM_THREADS": os.cpu_count(), "ENABLE_HYPER_THREADING": True}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {**cores, **(FLOAT32 if float32 else {})}
    )
    return lambda workload: serve_in_steps(Engine(pipeline), workload)
