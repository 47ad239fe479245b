"""Run the engines and record the runs in `slides/data/`: `python -m slides record [NAME...]`.

The worked examples record every step of three requests, with the embedded model. The comparisons
use a tiny model and record counters, which do not depend on the machine. Lanes and the pages of the
player are in virtual time, so they do not depend on it either. Measured times (the growth of m1)
name the machine on which they were measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from common import EngineConfig, LoadedModel, load_model
from common.displays.demo import machine
from common.displays.workload import Workload, WorkloadResult, run
from common.fast.passes.pack import choose
from common.tracing.data import Frame, State, TraceData
from common.tracing.trace import Trace
from common.virtual_time import use_virtual_time
from milestones.chain import load
from milestones.lab.bench.roofline import measure
from milestones.recording import write

from .facts import RUN_PAGES, file_of
from .freshness import fingerprint, sources_of
from .record_electives import GRAMMARS, LESSONS
from .record_ideas import IDEAS, PAGED, ROWS, TINY, mixed_lengths
from .record_lanes import LANES, WITH_GRAMMARS
from .record_measured import MEASURED, OF_THIS_MACHINE
from .record_mistakes import MISTAKES
from .record_sides import SIDES
from .record_steps import STEPS
from .workloads import EXAMPLES, PROMPTS, config_of, params_of

Json = dict[str, Any]
Runs = dict[str, tuple[tuple[str, ...], Callable[..., Json]]]  # engines, and what runs them


def record(name: str) -> None:
    """Make one entry of a file of `slides/data/`: run the engines and write the result."""
    milestones, make = RUNS[name]
    recorders = [file for file, runs in RECORDERS.items() if name in runs]
    sources = sources_of(*milestones) + recorders
    made = {"sources": sources, "fingerprint": fingerprint(sources), **make(name)}
    file = file_of(name)
    others = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write(file, dict(sorted({**others, name: made}.items())))


def example(name: str, loaded: LoadedModel | None = None, milestone: str | None = None) -> Json:
    """Run a worked example on its milestone, or on another engine. Return every step."""
    own, config = config_of(name)
    loaded = loaded or load_model(EngineConfig())
    data, tables = _played(name, loaded, milestone or own)
    words = {
        request_id: [loaded.tokenizer.decode([t]) for t in loaded.tokenizer(prompt)["input_ids"]]
        for request_id, prompt in PROMPTS.items()
        if request_id in params_of(name)
    }
    steps = [{**s, "tables": t} for s, t in zip(steps_of(data), tables, strict=True)]
    return {"milestone": milestone or own, "config": config, "prompts": words, "steps": steps}


def run_page(name: str, loaded: LoadedModel | None = None) -> Json:
    """Run a worked example, and return its trace for the player."""
    name = name.removeprefix("run_")
    data, _tables = _played(name, loaded or load_model(EngineConfig()), config_of(name)[0])
    return {"trace": data.as_json()}


def _played(
    name: str, loaded: LoadedModel, milestone: str
) -> tuple[TraceData, list[dict[str, list[int]]]]:
    """Run a worked example in virtual time. Return its trace, and the tables of each step."""
    tables = []
    engine = load(milestone).LLMEngine(EngineConfig(**config_of(name)[1]), loaded)
    use_virtual_time(engine)
    with engine, Trace(engine) as trace:
        for request_id, params in params_of(name).items():
            engine.add_request(PROMPTS[request_id], params, request_id)
        while engine.has_unfinished_requests():
            engine.step()
            engine.check_invariants()
            tables.append(_tables(engine))
    return trace.data, tables


def plan_example(_name: str, loaded: LoadedModel | None = None) -> Json:
    """Run the worked example of m5 on multi_step."""
    return example("m5_example", loaded, "multi_step")


def _tables(engine: Any) -> dict[str, list[int]]:
    """Return the pages of each running request, in order of position."""
    kv_cache: Any = getattr(engine.core.scheduler, "kv_cache", None)
    if not hasattr(kv_cache, "pages_of"):
        return {}
    return {r.request_id: list(kv_cache.pages_of(r)) for r in engine.core.scheduler.running}


def steps_of(trace: TraceData) -> list[Json]:
    """Return each step: the tokens computed for each request, and the state after the step."""
    names = [info.request_id for info in trace.requests]
    steps = []
    for frame, state in trace.states():
        if frame.step > 0:
            steps.append(_step(names, frame, state))
    return steps


def _step(names: list[str], frame: Frame, state: State) -> Json:
    owner: dict[Any, str | None] = {None: None, "tree": "tree", **dict(enumerate(names))}
    return {
        "batches": [{names[i]: n for i, n in batch.items()} for batch in frame.batches],
        "retracted": [names[i] for i in frame.retracted],
        "waiting": [names[i] for i in state.waiting],
        "said": {names[i]: r["text"] for i, r in frame.requests.items() if r.get("text")},
        "requests": {
            names[i]: {key: value for key, value in r.items() if key != "node"}
            for i, r in state.requests.items()
        },
        "pages": {page: owner[who] for page, who in sorted(state.pages.items())},
        "nodes": {number: dict(node) for number, node in state.nodes.items()},
        "stats": dict(state.stats),
    }


def growth(_name: str) -> Json:
    """Measure the milliseconds for the next token after a context, with the cache and without."""
    from m1_single import LLMEngine
    from m1_single.demo.growth import CONTEXTS, next_token_ms

    loaded = load_model(EngineConfig())
    cached, naive = (LLMEngine(EngineConfig(), loaded, use_cache=c) for c in (True, False))
    return {
        "machine": machine(),
        "contexts": list(CONTEXTS),
        "cached_ms": [round(next_token_ms(cached, n), 1) for n in CONTEXTS],
        "recompute_ms": [round(next_token_ms(naive, n), 1) for n in CONTEXTS],
    }


def linears(_name: str) -> Json:
    """Measure the milliseconds of all linear layers of the embedded model by rows, and the roofs.

    The sizes take turns, and the fastest round counts: other work of the machine disturbs it least.
    """
    model = load_model(EngineConfig(), plain=True).model
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    packing = choose(max(layers, key=lambda layer: layer.weight.numel()))
    assert packing is not None, "cannot record: weights cannot be packed on this machine"
    products = [(layer.in_features, packing(layer)) for layer in layers]

    def milliseconds(inputs: dict[int, torch.Tensor]) -> float:
        started = time.perf_counter()
        for size, product in products:
            product(inputs[size])
        return 1000 * (time.perf_counter() - started)

    numbers = sum(layer.weight.numel() for layer in layers)
    rows = [1, 4, 8, 16, 32, 48]
    inputs = {n: {size: torch.randn(n, size) for size, _ in products} for n in rows}
    with torch.inference_mode():
        rounds = [{n: milliseconds(inputs[n]) for n in rows} for _ in range(15)]
    roofs = measure(model)
    return {
        "machine": machine(),
        "rows": rows,
        "ms": [round(min(times[n] for times in rounds), 1) for n in rows],
        "bytes_per_second": roofs.bytes_per_second,
        "flops_per_second": roofs.flops_per_second,
        "weights_gb": numbers * 4 / 1e9,
        "gflop_per_row": 2 * numbers / 1e9,
    }


def counters(milestone: str, workload: Workload, **config: Any) -> Json:
    """Return the counters of a milestone after a workload. They do not depend on the machine."""
    loaded = load_model(EngineConfig(model=TINY))
    engine = load(milestone).LLMEngine(EngineConfig(model=TINY, **config), loaded)
    with engine:
        result: WorkloadResult = run(engine, workload)
    return {
        "config": config,
        "most_running": result.most_running,
        "kv_reserved": result.kv_reserved,
        "kv_used": result.kv_used,
        "stats": result.stats,
    }


def memory(_name: str) -> Json:
    """Run 24 requests of mixed length on m2 and m3, in KV memory for four rows of 320 tokens."""
    return {
        "memory_tokens": 4 * 320,
        "m2_continuous": counters("m2_continuous", mixed_lengths(), **ROWS),
        "m3_paged": counters("m3_paged", mixed_lengths(), **PAGED),
    }


def reuse(_name: str) -> Json:
    """Run twelve requests with three long instructions on m3 and m4, and with every policy."""
    prompts = [
        [*range(1, 41), *(50 + 60 * (i % 3) + j % 60 for j in range(120)), *(i * 5 + 1,) * 12]
        for i in range(12)
    ]
    workload = Workload(prompts, [8] * 12, ignore_eos=True)
    shared: Json = {"max_num_seqs": 4, "page_size": 8}
    small: Json = {"max_num_seqs": 2, "page_size": 8, "num_pages": 46, "seed": 0}
    return {
        "m3_paged": counters("m3_paged", workload, **shared, num_pages=256),
        "m4_radix": counters("m4_radix", workload, **shared, num_pages=256),
        "policies": {
            policy: counters("m4_radix", workload, **small, schedule_policy=policy)
            for policy in ("fcfs", "lpm", "dfs-weight", "lof", "random")
        },
    }


# Another run of these is equal.
EQUAL: Runs = {
    **{name: ((milestone,), example) for name, (milestone, _) in EXAMPLES.items()},
    "m3_memory": (("m2_continuous", "m3_paged"), memory),
    "m4_reuse": (("m3_paged", "m4_radix"), reuse),
    "multi_step_example": (("multi_step",), plan_example),
    **IDEAS,
    **MISTAKES,
    **LANES,
    **LESSONS,
    **MEASURED,
    **SIDES,
    **STEPS,
    **GRAMMARS,
}
RUNS: Runs = {
    **EQUAL,
    "m2_linears": ((), linears),
    "m1_growth": (("m1_single",), growth),
    **WITH_GRAMMARS,
    **OF_THIS_MACHINE,
    **{f"run_{name}": ((config_of(name)[0],), run_page) for name in RUN_PAGES},
}
RECORDERS = {
    "slides/record_ideas.py": IDEAS,
    "slides/record_lanes.py": {**LANES, **WITH_GRAMMARS},
    "slides/record_mistakes.py": MISTAKES,
    "slides/record_electives.py": {**LESSONS, **GRAMMARS},
    "slides/record_measured.py": {**MEASURED, **OF_THIS_MACHINE},
    "slides/record_sides.py": SIDES,
    "slides/record_steps.py": STEPS,
}
