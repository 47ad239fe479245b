"""How the cost of the next token grows with the context, with the KV cache and without."""

from __future__ import annotations

from rich.table import Table

from common import EngineConfig, SamplingParams
from common.displays.shapes import bar, summary_table

from .. import LLMEngine

CONTEXTS = (32, 64, 128, 256, 512)  # tokens


def growth(engine: LLMEngine, naive: LLMEngine) -> Table:
    """Return a table of the milliseconds for the next token, by context.

    engine: has the KV cache. naive: computes the whole context again.
    """
    limit = engine.loaded.resolve_max_model_len(EngineConfig())
    contexts = [n for n in CONTEXTS if n + 4 <= limit]
    times = {n: (next_token_ms(engine, n), next_token_ms(naive, n)) for n in contexts}
    longest = max(ms for pair in times.values() for ms in pair)
    table = summary_table("\nThe next token, by context", "context", "cached", "recompute", "ms")
    table.columns[3].justify = "left"
    for n, (cached, recomputed) in times.items():
        table.add_row(
            f"{n} tokens",
            f"{cached:.1f} ms",
            f"{recomputed:.1f} ms",
            bar([(cached / longest, "█", "cached")], 30) + "\n"
            + bar([(recomputed / longest, "█", "prompt")], 30),
        )  # fmt: skip
    return table


def next_token_ms(engine: LLMEngine, context: int) -> float:
    """Return the milliseconds of the fastest of three steps after a context of that many tokens."""
    prompt = [1 + i % 200 for i in range(context)]
    engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    engine.step()
    times = []
    while engine.has_unfinished_requests():
        started = engine.now()
        engine.step()
        times.append(engine.now() - started)
    return 1000 * min(times)
