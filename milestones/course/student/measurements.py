"""The tables of `python -m milestones measure`: what each counts or measures, and how."""

from __future__ import annotations

from common import EMBEDDED_MODEL

from . import measure_agents as agents
from . import measure_counters as counters
from . import measure_disaggregated as disaggregated
from . import measure_electives as electives
from . import measure_invariance as invariance
from . import measure_kv_quant as kv_quant
from . import measure_times as times
from . import measure_vision as vision
from .measuring import TINY, Measurement
from .workload_run import by_workload

WINDOWED = "tiny-gemma3_text"  # random weights: the pages are counted, and the text means nothing
# More tables, each by the name of its option: the engine, what it counts or measures, and how.
MORE = {
    "static": ("m2", "count static and continuous batches", Measurement(
        ("rows", "batches", "forwards", "padding computed", "tokens per forward"),
        counters.by_batching, TINY, (1, 2, 4, 6, 8, 14),
        "A static batch waits for its longest request, so it runs more forwards for the"
        " same tokens.",
    )),
    "chunks": ("m3", "the tokens of a step against TTFT and ITL", Measurement(
        ("tokens of a step", "TTFT, steps", "TTFT, ms", "most tokens in a step", "ITL at most, ms"),
        counters.by_chunk, TINY, (16, 32, 64, 128, 256, 512),
        "More tokens in a step bring the first token of the long prompt sooner, and let"
        " the other requests wait longer for their next one.",
    )),
    "workload": ("m3", "count the requests of the handout's table", Measurement(
        ("", "forwards", "padding", "unwritten", "at once", "retracted"),
        by_workload, TINY, (24, 20, 16),
        "In the same memory, pages hold more requests at once, so fewer forwards give the same"
        " tokens.",
    )),
    "shared": ("m4", "count the KV that a step reads of a prefix", Measurement(
        ("prefix", "KV read, MB", "if read once, MB", "share"),
        counters.by_prefix, EMBEDDED_MODEL, (0, 64, 128, 256, 448),
        "The longer the common prefix, the more of the KV is read again and again: each"
        " request reads the shared pages for itself.",
    )),
    "layers": ("invariance", "how a difference grows with the layers", Measurement(
        ("variant", "first layer", "middle", "last layer", "logits"),
        invariance.by_layer, EMBEDDED_MODEL, (0, 0.5, 1),
        "A difference that begins in one operation is in all layers after it.",
    )),
    "scores": ("invariance", "sampled tokens that are scored again", Measurement(
        ("sampled by", "scored by", "largest difference"),
        invariance.by_scorer, EMBEDDED_MODEL, (7,),
        "An exact engine gives the same log probabilities again. Another program adds in other"
        " orders.",
    )),
    "bits": ("kv_quant", "what each scheme changes, down to 3 bits", Measurement(
        ("scheme", "perplexity", "KL divergence", "equal tokens of 100"),
        kv_quant.by_bits, EMBEDDED_MODEL, (8, 7, 6, 5, 4, 3),
        "With each bit less, the divergence is some four times larger. Eight bits change the text's"
        " probability little, and some answers early. fp8 lies between 6 and 7 bits. With"
        " a scale for each channel of keys, 4 bits are as good as 6.",
    )),
    "load": ("disaggregated", "more and more prompts", Measurement(
        (
            "ms", "prefill load", "64: ITL p99", "TTFT p95", "256: ITL p99", "TTFT p95",
            "apart: ITL p99", "TTFT p95",
        ),
        disaggregated.by_load, TINY, (160, 80, 60, 50, 40),
        "When prompts keep more than one machine busy, one prefill side is not enough. Times are"
        " virtual milliseconds.",
    )),
    "contexts": ("kv_quant", "the time of a step against its context", Measurement(
        ("context", "cache", "KV, MB", "ms", "float32 / it"),
        kv_quant.by_context, EMBEDDED_MODEL, (128, 512, 2048),
        "The longer the context, the larger the part of a step that reads keys and values, and the"
        " more a step gains.",
    )),
}  # fmt: skip
MEASUREMENTS = {
    "m1": Measurement(
        ("context", "tokens fed, cache", "ms, cache", "tokens fed, no cache", "ms, no cache"),
        times.by_context, EMBEDDED_MODEL, (16, 64, 256, 480),
        "With the cache, a step feeds one token, whatever the context. Without it, a "
        "step feeds the whole context.",
    ),
    "m2": Measurement(
        ("rows", "ms per step", "ms per token"),
        times.by_rows, EMBEDDED_MODEL, (1, 2, 4, 8, 16, 32, 64),
        "A step of more rows takes longer, but not in proportion, so a token becomes "
        "cheaper.",
    ),
    "m3": Measurement(
        ("page size", "most running", "held, not written", "steps", "retractions"),
        counters.by_page_size, TINY, (1, 2, 4, 8, 16, 32, 64),
        "Smaller pages leave fewer slots held and not written, so more requests run at "
        "once.",
    ),
    "m4": Measurement(
        ("pages", "tokens", "reused", "prompt tokens computed"),
        counters.by_pool, TINY, (24, 32, 48, 64, 80, 96, 128, 192),
        "A pool that is too small evicts prefixes before they are asked for again. "
        "Above some size, a larger pool reuses no more.",
    ),
    "m5": Measurement(
        ("emulated ms", "h", "f", "h + f", "serial", "max(h, f)", "overlapped"),
        times.by_forward, TINY, (0, 1, 2, 4, 8, 16),
        "The serial loop takes the time of the host and of the forward. With long emulated "
        "forwards, the overlapped loop takes the longer of both. With short ones, both need "
        "the cores of this machine, so it gains less.",
    ),
    "multi_step": Measurement(
        (
            "steps per plan", "tokens", "in vain", "share", "TTFT p50, ms", "TTFT p95, ms",
            "ITL p50, ms", "tokens/s",
        ),
        times.by_plan, TINY, (1, 2, 4, 8),
        "A longer plan needs the host less often, but it computes more tokens in vain, "
        "and a request that arrives waits for its end.",
    ),
    "structured_output": Measurement(
        ("requests", "loop", "gap, ms", "tokens/s", "ratio"),
        times.by_grammar, EMBEDDED_MODEL, (1, 8),
        "Where each step waits for its mask, the device is idle for the longest time. "
        "Delayed sampling makes masks while a forward runs, so the gap is shorter.",
    ),
    "speculative": Measurement(
        (
            "text", "requests", "steps, m5", "steps", "drafted", "accepted", "tokens/s, m5",
            "tokens/s", "ratio",
        ),
        times.by_text, EMBEDDED_MODEL, (1, 16),
        "Drafts gain where a text repeats itself or was written before, and few requests "
        "run. Elsewhere they gain nothing, and the search for them takes time.",
    ),
    "lora": Measurement(
        ("adapters", "way", "steps", "ratio"), times.by_batch, EMBEDDED_MODEL, (8,),
        "All adapters in one batch take as many steps as one model. One batch for each "
        "adapter takes many more.",
    ),
    "hybrid_memory": Measurement(
        ("tokens", "layers alike", "most", "at the end", "share"),
        electives.by_length, WINDOWED, (32, 64, 128, 256, 480),
        "A layer with a window frees the pages that its window has left behind, so a "
        "longer prompt saves a larger part.",
    ),
    "priority": Measurement(
        (
            "load", "engine", "urgent TTFT p50, steps", "p95", "others p50", "steps", "computed",
            "cached", "preempted", "pages loaded",
        ),
        electives.by_urgency, TINY, (0, 2),
        "Urgent requests begin sooner, and the others pay for it. Pages that continue "
        "in host memory are not computed again.",
    ),
    "agents": Measurement(
        (
            "policy", "again", "hits", "TTFT p50", "p95", "tail: again", "tail: hits",
            "tail: TTFT",
        ),
        agents.by_policy, TINY, (0, 0.5),
        "What the cache knows of the pauses decides how much is computed again. Without host "
        "memory, only the oracle helps the tail. Times are virtual milliseconds.",
    ),
    "kv_quant": Measurement(
        ("memory, kB", "cache", "pages", "most running", "retractions", "steps"),
        kv_quant.by_memory, TINY, (32, 48, 96),
        "In the same memory, lines of 8 bits hold some three times as many tokens, and lines of "
        "4 bits five times, so more requests run at once, and fewer steps serve them all.",
    ),
    "disaggregated": Measurement(
        ("machines", "ITL p50", "ITL p99", "TTFT p50", "TTFT p95", "MB", "hidden"),
        disaggregated.by_chunk, TINY, (64, 256, 1024),
        "Two sides have the best latency between tokens, and not the best time to the first one."
        " Times are virtual milliseconds.",
    ),
    "embedding": Measurement(
        (
            "budget", "vectors", "gap, steps", "gap, tokens p50", "gap, tokens max",
            "vector, steps p50", "steps",
        ),
        electives.by_budget, TINY, (16, 32, 64, 256),
        "A larger budget ends the vectors sooner, and lets the texts wait longer for "
        "their next token.",
    ),
    "invariance": Measurement(
        ("variant", "texts", "log probs", "first", "operation", "tokens/s"),
        invariance.by_variant, EMBEDDED_MODEL, (100,),
        "Where the order of a sum depends on the batch, a prompt has many answers. In bfloat16 the "
        "texts differ, too.",
    ),
    "vision": Measurement(
        ("images", "kept", "encoded", "computed", "cached", "TTFT p50", "p95", "all"),
        vision.by_way, vision.MODEL, (1, 4, 32),
        "The keys save prompt tokens where prompts begin alike. The encoder cache also helps where "
        "the image comes after other text. Times are virtual milliseconds.",
    ),
}  # fmt: skip
