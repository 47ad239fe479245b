"""The workloads of the bench for `gpu-check`: every milestone, and other engines beside them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from common import EngineConfig, LoadedModel, load_model
from common.displays.workload import Workload, WorkloadResult, run

from .contenders import Peer
from .gpu_speed import quick_collections
from .peers import PEERS, run_peer
from .workloads import WORKLOADS, workload

FEW = 4  # requests of `nano` for an engine that serves one at a time: 256 would take an hour
Measure = Callable[[Workload], WorkloadResult]
Rows = Iterator[dict[str, Any]]


def of_milestone(milestone: str, device: str, model: str, few: bool) -> Rows:
    """Measure a milestone on each workload, with a new engine on the same model each time."""
    loaded = load_model(EngineConfig(model=model, device=device))
    engine_class = importlib.import_module(milestone).LLMEngine

    def measure(work: Workload) -> WorkloadResult:
        config = EngineConfig(**work.config, device=device)
        with engine_class(config, loaded) as engine:
            run(engine, work.warm_up())
            engine.reset_prefix_cache()
            with quick_collections():
                return run(engine, work)

    return _rows(measure, loaded, device, few)


def of_hugging_face(name: str, device: str, model: str) -> Rows:
    """Measure an engine of Hugging Face: `hf-static` or `hf-batch`."""
    loaded = load_model(EngineConfig(model=model, device=device), plain=True)

    def measure(work: Workload) -> WorkloadResult:
        run_peer(PEERS[name], loaded, work.warm_up())
        return run_peer(PEERS[name], loaded, work)

    return _rows(measure, loaded, device, few=False)


def of_vllm(device: str, model: str) -> Rows:
    """Measure the vLLM of this Python on the same weights, which are written to a folder."""
    loaded = load_model(EngineConfig(model=model, device=device), plain=True)
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        peer = Peer("vllm", Path(sys.executable), lambda: folder, forgets=True)
        loaded.model.to("cpu")  # type: ignore[arg-type]  # the memory of the GPU is for vLLM
        torch.cuda.empty_cache()
        try:
            yield from _rows(peer.run, loaded, device, few=False)
        finally:
            peer.close()


def has_vllm() -> bool:
    """Return whether this Python has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def _rows(measure: Measure, loaded: LoadedModel, device: str, few: bool) -> Rows:
    """Measure each workload, and yield its row. One that fails loses nothing but itself."""
    for name in WORKLOADS:
        work = workload(name, loaded.name, loaded.vocab_size, device != "cpu")
        if few and name == "nano":
            work.prompts, work.max_tokens = work.prompts[:FEW], work.max_tokens[:FEW]
        row = {"workload": name, "requests": len(work.prompts), "sampling": work.sampling}
        try:
            speed = measure(work).tokens_per_second
        except Exception as error:
            yield {**row, "error": repr(error)[:500], "passed": False}
        else:
            yield {**row, "tokens_per_second": speed, "passed": True}
