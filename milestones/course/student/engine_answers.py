"""Runs the whole engine of a milestone on a few requests, for `break`: right answers beside wrong.

The command runs this file with pytest, in a process of its own. The result is in
`.ladder/answers.json` of the tree. The engine of an elective gets requests that use its lesson.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import (
    AgentHint,
    EngineConfig,
    LoRARequest,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

from ...chain import engines, load, short
from ...lab.instruments.audit import poison_of
from ...lab.instruments.random_adapter import write_adapter
from ...lab.instruments.random_images import prompt_of
from ...lab.instruments.streams import EarlyStream, LateStream
from .progress import ANSWERS

ROOT = Path(__file__).resolve().parents[3]
STREAMS = {"a thread": None, "early": EarlyStream, "late": LateStream}
PROMPTS = (
    [5, 6, 7, 8, 9, 10], [9] * 14, [5, 6, 7, 8, 9, 11, 12], [3], list(range(60, 85)),
    [5, 6, 7, 8, 30], [41, 42, 43],
)  # fmt: skip
STOPS = [token for token in range(256) if token % 5 == 0]  # every second request ends with one
MOST_STEPS = 400
MOST_TOKENS = 20
WITH_KERNELS = "with the Triton kernels, in an interpreter,"  # on a CPU, the engine calls others
SHOWN = ("num_steps", "num_retractions", "padding_tokens", "cached_prompt_tokens")
# For the electives.
OWN_CONFIG: dict[str, dict[str, Any]] = {
    "kv_quant": {"attention_backend": "torch"},  # its exercises are in torch
    "vision": {"model": "tiny-qwen2_vl", "encoder_cache_size": 6},  # room for one image
}
IMAGES = {"1": [(1, 2, 2)], "3": [(2, 2, 2)], "6": [(1, 2, 3), (3, 2, 3)]}  # by request
CLASSES = 3
ANY = StructuredOutputsParams(regex=".*")  # `ClassGrammar` takes its place
URGENT = ("5", "7")  # requests that preempt others
LATE = 2  # steps before they arrive
POOLED = {"4": PoolingParams("LAST"), "5": PoolingParams("MEAN"), "6": PoolingParams("MEAN")}
ADAPTERS, NUM_SLOTS = "ABC", 2
ADAPTER_OF = {"1": "A", "2": "B", "4": "A", "5": "C", "6": "B"}  # by request
NUM_HOST_PAGES = 4  # so few that copies are dropped


@pytest.mark.parametrize("milestone", engines(ROOT))
def test_answers(milestone: str) -> None:
    """Write what the engine of a milestone answers, for each of its streams."""
    keep(answers_of(milestone))


@pytest.mark.parametrize("milestone", engines(ROOT))
def test_answers_of_kernels(milestone: str) -> None:
    """Write short answers of an engine with the Triton kernels.

    The pool is full of NaN: the memory after a context was perhaps never written.
    """
    pytest.importorskip("triton", reason="Triton is for Linux")
    with load(milestone).LLMEngine(config_of(milestone, attention_backend="triton")) as engine:
        for memory in (*engine.core.runner.kv_pool.keys, *engine.core.runner.kv_pool.values):
            memory.fill_(poison_of(memory))
        keep({WITH_KERNELS: result_of(engine, most_tokens=3)})


def keep(found: dict[str, Any]) -> None:
    """Write the results for `break`."""
    path = ROOT / ANSWERS
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")


def config_of(milestone: str, **fields: Any) -> EngineConfig:
    """Return the configuration of the engine of a milestone."""
    return EngineConfig(
        device="cpu", max_num_seqs=3, page_size=4, num_pages=14, max_model_len=48,
        max_num_batched_tokens=64 if short(milestone) in ("m1", "m2") else 12,
        **{"model": "tiny-llama", **OWN_CONFIG.get(milestone, {}), **fields},
    )  # fmt: skip


def answers_of(milestone: str) -> dict[str, Any]:
    """Return the results by stream. An engine without a forward stream has one result."""
    found: dict[str, Any] = {}
    for name, stream in STREAMS.items():
        engine = load(milestone).LLMEngine(config_of(milestone))
        prepare(engine)
        if hasattr(engine.core.runner, "stream"):
            engine.core.runner.stream = stream() if stream else engine.core.runner.stream
            engine.core.runner.graphs.sizes = [1, 2, 4]  # as on a GPU: a batch of 3 is padded
            found[f"on {name}" if stream is None else f"on the {name} stream"] = result_of(engine)
        else:
            return {"": result_of(engine)}
    return found


def params_of(number: int, most_tokens: int) -> SamplingParams:
    """Return the parameters of a request. Those with even numbers have stop tokens."""
    return SamplingParams(
        max_tokens=min(MOST_TOKENS - 3 * (number % 3), most_tokens), temperature=0, ignore_eos=True,
        stop_token_ids=[] if number % 2 else STOPS,
    )  # fmt: skip


def result_of(engine: Any, most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """Return the tokens of each request, some counters, and the error that ended the run."""
    answers: dict[str, list[int]] = {}
    error = None
    try:
        for step in range(MOST_STEPS):
            for number, prompt in enumerate(PROMPTS, start=1):
                if arrives(engine, str(number)) == step:
                    add_request(engine, list(prompt), params_of(number, most_tokens), str(number))
            for output in engine.step():
                answers[output.request_id] = answer_of(output)
            if not engine.has_unfinished_requests():
                break
        else:
            error = f"the requests have not ended after {MOST_STEPS} steps"
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    stats = engine.stats()
    counters = {name: getattr(stats, name) for name in SHOWN}
    return {"answers": answers, "counters": counters, "error": error}


class ClassGrammar:
    """A grammar that needs no library: at each place, one residue class of token ids is allowed."""

    error = ""

    def __init__(self, vocab_size: int, place: int = 0) -> None:
        self.vocab_size = vocab_size
        self.place = place

    def fork(self) -> ClassGrammar:
        return ClassGrammar(self.vocab_size, self.place)

    def accept(self, token_id: int) -> bool:
        """Go on by a token, if it is allowed. The token decides about the next class."""
        if token_id % CLASSES != self.place:
            return False
        self.place = (token_id // CLASSES + 1) % CLASSES
        return True

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that are allowed next, and clear all others, [W] int32."""
        tokens = np.arange(32 * len(bits))
        allowed = (tokens % CLASSES == self.place) & (tokens < self.vocab_size)
        bits[:] = np.packbits(allowed, bitorder="little").view(np.int32)


def prepare(engine: Any) -> None:
    """Prepare the engine of an elective. The engines of milestones stay as they are."""
    if (drafting := getattr(engine.core.scheduler, "drafting", None)) is not None:
        drafting.drafter.sizes = (1,)  # a random model hardly ever repeats two tokens
    if has_grammars(engine):
        engine.core.scheduler.grammars.compiler.compile = lambda _: ClassGrammar(
            engine.loaded.vocab_size
        )
        engine.core.scheduler.grammars.compiler.submit(
            ANY
        ).result()  # then no run depends on the compiler's threads
        engine.input_processor.no_structured_outputs = None
    if has_adapters(engine):
        add_adapters(engine)
    if has_priorities(engine):
        engine.core.costs.page_seconds = 0.0  # then no run depends on measured times
        cache = engine.core.scheduler.kv_cache.radix_cache
        cache.free_host_pages = cache.free_host_pages[-NUM_HOST_PAGES:]
        cache.num_host_pages = NUM_HOST_PAGES


def has_grammars(engine: Any) -> bool:
    """Return whether requests may have grammars."""
    return hasattr(engine.core.scheduler, "grammars")


def has_priorities(engine: Any) -> bool:
    """Return whether requests have priorities."""
    return hasattr(engine.core.scheduler, "preemption")


def has_hints(engine: Any) -> bool:
    """Return whether requests may belong to conversations."""
    return hasattr(getattr(engine.core.scheduler, "kv_cache", None), "conversations")


def hint_of(name: str) -> AgentHint:
    """Return the hint of a request. Its pause is longer than the run, whatever the machine does."""
    return AgentHint(f"talk {name}", expected_pause=1000.0 * int(name))


def has_embeddings(engine: Any) -> bool:
    """Return whether requests may be pooling requests."""
    return getattr(engine.input_processor, "hidden_size", None) is not None


def has_adapters(engine: Any) -> bool:
    """Return whether requests may have LoRA adapters."""
    return hasattr(engine, "add_lora")


def add_adapters(engine: Any) -> None:
    """Load random adapters, more than there are slots. The products are those of torch."""
    engine.core.runner.lora.kernels = None
    engine.core.scheduler.slots.num_slots = NUM_SLOTS
    engine.core.scheduler.slots.free_slots = list(range(NUM_SLOTS, 0, -1))
    with tempfile.TemporaryDirectory() as folder:
        for seed, name in enumerate(ADAPTERS):
            path = write_adapter(Path(folder, name), engine.adapters.shapes, seed)
            engine.add_lora(LoRARequest(name, path))


def arrives(engine: Any, name: str) -> int:
    """Return the number of steps before a request arrives."""
    return LATE if has_priorities(engine) and name in URGENT else 0


def add_request(engine: Any, prompt: list[int], params: SamplingParams, name: str) -> None:
    """Add a request. Some are urgent or pooled, or have a grammar, an adapter or images."""
    if has_embeddings(engine) and name in POOLED:
        engine.add_request(prompt, POOLED[name], name)
        return
    if has_grammars(engine) and not params.stop_token_ids:
        params = SamplingParams(max_tokens=params.max_tokens, temperature=0, structured_outputs=ANY)
    if has_adapters(engine) and (adapter := ADAPTER_OF.get(name)):
        path = engine.adapters.adapters[adapter].path
        engine.add_request(prompt, params, name, lora_request=LoRARequest(adapter, path))
    elif hasattr(engine.core.scheduler, "encoder_cache") and name in IMAGES:
        engine.add_request(prompt_of([*prompt[:3], *IMAGES[name], *prompt[3:]]), params, name)
    elif has_priorities(engine):
        hints = {"agent_hint": hint_of(name)} if has_hints(engine) else {}
        engine.add_request(prompt, params, name, priority=-int(name in URGENT), **hints)
    else:
        engine.add_request(prompt, params, name)


def answer_of(output: Any) -> list[int]:
    """Return the tokens of an output. Of a vector, return its first numbers, in hundredths."""
    if isinstance(output, PoolingRequestOutput):
        data = output.outputs.data
        return [] if data is None else [round(100 * float(value)) for value in data[:8]]
    return list(output.outputs[0].token_ids)
