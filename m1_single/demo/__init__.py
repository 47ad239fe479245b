"""The same prompt with and without the KV cache: `python -m m1_single.demo`."""

from __future__ import annotations

import time
from argparse import Namespace

from rich.console import Console

from common import EngineConfig, RequestOutput, SamplingParams, TokensPrompt
from common.displays.dashboard import summary_table
from common.displays.demo import chats, make_console, open_engine, parser, recorded

from .. import LLMEngine
from .growth import growth


def main() -> None:
    """Stream each answer, compute it again without the cache, and show how both costs grow."""
    args = parser("One request at a time, with a KV cache.", requests=2, max_tokens=48).parse_args()
    console = make_console(args)
    config = EngineConfig(model=args.model, device=args.device)
    with open_engine(LLMEngine, config, console) as engine:
        naive = LLMEngine(engine.config, engine.loaded, use_cache=False)
        with recorded(engine, args, console):
            for question in chats(args.requests):
                message = {"role": "user", "content": question}
                prompt = engine.input_processor.apply_chat_template([message])
                console.print(f"\n[bold]> {question}[/]", highlight=False)
                cached = stream(engine, prompt, args, console)
                recomputed = stream(naive, prompt, args, None)
                compare(cached, recomputed, console)
        console.print(growth(engine, naive))


def stream(
    engine: LLMEngine, prompt: TokensPrompt, args: Namespace, console: Console | None
) -> tuple[RequestOutput, float, int]:
    """Generate greedily, and print the text as it comes.

    Returns the final output, the seconds, and the number of tokens that were computed.
    """
    before, started, shown = engine.stats(), time.perf_counter(), 0
    for output in engine.stream(prompt, SamplingParams(max_tokens=args.max_tokens, temperature=0)):
        if console is not None:
            text = output.outputs[0].text
            console.print(text[shown:], end="", soft_wrap=True, highlight=False, markup=False)
            shown = len(text)
        if args.check:
            engine.check_invariants()
    seconds, after = time.perf_counter() - started, engine.stats()
    if console is not None:
        console.print()
    computed = after.prefill_tokens + after.decode_tokens
    return output, seconds, computed - before.prefill_tokens - before.decode_tokens


def compare(
    cached: tuple[RequestOutput, float, int],
    recomputed: tuple[RequestOutput, float, int],
    console: Console,
) -> None:
    """Print the costs of one answer, with the cache and without."""
    table = summary_table("", "", "tokens/s", "seconds", "tokens computed")
    runs = {"with the KV cache": cached, "full recompute": recomputed}
    for name, (output, seconds, computed) in runs.items():
        tokens = len(output.outputs[0].token_ids)
        table.add_row(name, f"{tokens / seconds:.1f}", f"{seconds:.2f}", f"{computed}")
    console.print(table)
    same = cached[0].outputs[0].token_ids == recomputed[0].outputs[0].token_ids
    console.print(
        f"The text is {'the same' if same else 'NOT the same'}. "
        f"The engine with the cache is {recomputed[1] / cached[1]:.1f} times as fast.",
        highlight=False,
    )
