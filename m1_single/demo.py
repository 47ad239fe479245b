"""The same prompt with and without the KV cache: `python -m m1_single.demo`."""

from __future__ import annotations

import time
from argparse import Namespace

from rich.console import Console
from rich.table import Table

from common import EngineConfig, RequestOutput, SamplingParams, TokensPrompt
from common.dashboard import bar, summary_table
from common.demo import chats, machine, make_console, open_engine, parser, recorded

from . import LLMEngine

CONTEXTS = (32, 64, 128, 256, 512)


def main() -> None:
    """Stream an answer, run it again without the cache, then show how both grow with length."""
    args = parser("One request at a time, with a KV cache.", requests=2, max_tokens=48).parse_args()
    console = make_console(args)
    config = EngineConfig(model=args.model, device=args.device)
    with open_engine(LLMEngine, config, console) as engine:
        console.print(f"[bold]m1_single[/] · {engine.loaded.name} · {machine()}", highlight=False)
        naive = LLMEngine(engine.config, engine.loaded, use_cache=False)
        with recorded(engine, args, console):
            for question in chats(args.requests):
                prompt = engine.input_processor.apply_chat_template(
                    [{"role": "user", "content": question}]
                )
                console.print(f"\n[bold]> {question}[/]", highlight=False)
                cached, seconds = stream(engine, prompt, args, console)
                compare(naive, prompt, cached, seconds, args, console)
        console.print(growth(engine, naive))


def stream(
    engine: LLMEngine, prompt: TokensPrompt, args: Namespace, console: Console | None
) -> tuple[RequestOutput, float]:
    """Generate greedily, printing the text as it comes; the final output and the seconds taken."""
    started, shown = time.perf_counter(), 0
    for output in engine.stream(prompt, SamplingParams(max_tokens=args.max_tokens, temperature=0)):
        if console is not None:
            text = output.outputs[0].text
            console.print(text[shown:], end="", soft_wrap=True, highlight=False, markup=False)
            shown = len(text)
        if args.check:
            engine.check_invariants()
    if console is not None:
        console.print()
    return output, time.perf_counter() - started


def compare(
    naive: LLMEngine,
    prompt: TokensPrompt,
    cached: RequestOutput,
    cached_seconds: float,
    args: Namespace,
    console: Console,
) -> None:
    """Run the same prompt with full recompute, and print what the same tokens cost."""
    before = naive.stats()
    recomputed, seconds = stream(naive, prompt, args, None)
    after = naive.stats()
    computed = after.prefill_tokens + after.decode_tokens
    computed -= before.prefill_tokens + before.decode_tokens
    tokens = len(cached.outputs[0].token_ids)
    prompt_tokens = len(cached.prompt_token_ids)
    same = cached.outputs[0].token_ids == recomputed.outputs[0].token_ids
    table = summary_table("", "", "tokens/s", "seconds", "tokens computed")
    table.add_row(
        "with the KV cache",
        f"{tokens / cached_seconds:.1f}",
        f"{cached_seconds:.2f}",
        f"{prompt_tokens + tokens - 1}",
    )
    table.add_row(
        "full recompute",
        f"{tokens / seconds:.1f}",
        f"{seconds:.2f}",
        f"{computed}",
    )
    console.print(table)
    console.print(
        f"{prompt_tokens} prompt + {tokens} output tokens; the text is "
        f"{'the same' if same else 'NOT the same'}; the cache is {seconds / cached_seconds:.1f} "
        f"times as fast.",
        highlight=False,
    )


def growth(engine: LLMEngine, naive: LLMEngine) -> Table:
    """Return a table: milliseconds for the next token after a context, both ways."""
    limit = engine.loaded.resolve_max_model_len(EngineConfig())
    contexts = [n for n in CONTEXTS if n + 4 <= limit]
    times = {n: (next_token_ms(engine, n), next_token_ms(naive, n)) for n in contexts}
    longest = max(ms for pair in times.values() for ms in pair)
    table = summary_table("\nThe next token, by context", "context", "cached", "recompute", "ms")
    table.columns[3].justify = "left"
    for n, (cached, recomputed) in times.items():
        table.add_row(
            f"{n} tokens",
            f"{cached:.0f} ms",
            f"{recomputed:.0f} ms",
            bar([(cached / longest, "█", "cyan")], 30) + "\n"
            + bar([(recomputed / longest, "█", "yellow")], 30),
        )  # fmt: skip
    return table


def next_token_ms(engine: LLMEngine, context: int) -> float:
    """Return the time of the fastest of three steps right after a context of so many tokens."""
    prompt = [1 + i % 200 for i in range(context)]
    engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    engine.step()
    times = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


if __name__ == "__main__":
    main()
