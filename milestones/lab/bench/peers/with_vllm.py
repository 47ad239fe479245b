"""vLLM, on the weights in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .serve import MAX_MODEL_LEN, MAX_NUM_SEQS, Json, Serve, serve_in_steps

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class Engine:
    """`vllm.LLM.llm_engine`, without text."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.counted: dict[str, int] = {}  # tokens of each request

    def add_request(self, name: str, prompt: list[int], max_tokens: int, workload: Json) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=workload["temperature"], max_tokens=max_tokens,
            ignore_eos=workload["ignore_eos"], detokenize=False,
        )  # fmt: skip
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.counted[name] = 0

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        for output in self.engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            new, self.counted[name] = tokens[self.counted[name] :], len(tokens)
            yield name, new, output.finished


def llm_of(model: str, **more: Any) -> Any:
    """Return `vllm.LLM` on the weights in a folder. On a CPU it always computes in float32."""
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()  # as our engines: `EngineConfig` and `workloads.py`
    return LLM(
        model, dtype="auto" if on_gpu else "float32", max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256 if on_gpu else MAX_NUM_SEQS, seed=0, enable_prefix_caching=True, **more,
    )  # fmt: skip


def start(model: str, _folder: str, float32: bool) -> Serve:
    """Start vLLM on the weights in a folder."""
    llm = llm_of(model)

    def serve(workload: Json) -> Json:
        served = serve_in_steps(Engine(llm.llm_engine), workload)
        llm.reset_prefix_cache()  # the next round sends the same prompts
        return served

    return serve
