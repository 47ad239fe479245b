"""Record which adapters have slots while requests with four adapters are served. Counters only.

No file here has a time, so another run is equal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import EngineConfig, LoadedModel, LoRARequest, SamplingParams, load_model
from milestones.chain import load
from milestones.lab.instruments.random_adapter import write_adapter

Json = dict[str, Any]
TINY = "tiny-llama"
# Before which step a request arrives, its adapter, and its output tokens.
REQUESTS = {
    "r1": (1, "A", 8), "r2": (1, "B", 3), "r3": (2, "C", 4), "r4": (3, None, 4), "r5": (3, "A", 4),
}  # fmt: skip


def shared_batch(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Return each step of five requests with two slots: the slot of each request, and the loads."""
    config = EngineConfig(
        model=TINY, device="cpu", max_num_seqs=8, max_model_len=64, page_size=4, num_pages=64,
        enable_overlap=False, max_loras=2,
    )  # fmt: skip
    steps: list[Json] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        load("lora").LLMEngine(config, loaded or load_model(config)) as engine,
    ):
        launch = engine.core.runner.launch
        for seed, name in enumerate("ABC"):
            path = write_adapter(Path(folder, name), engine.adapters.shapes, seed)
            engine.add_lora(LoRARequest(name, path))

        def noted(batch: Any, table: Any) -> Any:
            ids = [request.request_id for request in batch.requests]
            steps[-1]["slots"] = dict(zip(ids, batch.slots, strict=True))
            steps[-1]["loads"] = [f"{load.adapter.name} to {load.slot}" for load in batch.loads]
            return launch(batch, table)

        engine.core.runner.launch = noted
        coming = dict(REQUESTS)
        while coming or engine.has_unfinished_requests():
            due = [name for name, (step, *_) in coming.items() if step <= len(steps) + 1]
            for name in due:
                add(engine, name, *coming.pop(name)[1:])
            steps.append({"slots": {}, "loads": []})
            engine.step()
            engine.check_invariants()
            waiting = [request.request_id for request in engine.core.scheduler.waiting]
            steps[-1]["waiting"] = waiting
    adapters = {name: adapter for name, (_step, adapter, _tokens) in REQUESTS.items()}
    return {"num_slots": 2, "adapters": adapters, "steps": steps}


def add(engine: Any, name: str, adapter: str | None, max_tokens: int) -> None:
    """Add one of the requests."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    known = engine.adapters.adapters
    request = LoRARequest(adapter, known[adapter].path) if adapter else None
    engine.add_request([ord(name[1])] * 6, params, name, lora_request=request)


LORA: dict[str, tuple[tuple[str, ...], Callable[..., Json]]] = {
    "lora_example": (("lora",), shared_batch),
}
