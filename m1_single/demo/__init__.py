"""The same prompt with and without the KV cache: `python -m m1_single.demo`."""

from __future__ import annotations

from rich.console import Console

from common import EngineConfig, SamplingParams
from common.displays.comparison import seconds
from common.displays.demo import (
    chats,
    engine_options,
    goes_on,
    in_virtual_time,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.shapes import summary_table
from common.virtual_time import use_virtual_time

from .. import LLMEngine
from .growth import growth
from .race import Runner, race

LOOK = "Look at the tokens computed: with the KV cache, each step after the first computes one."
SEEN = (
    "With the cache, a token costs the same after a short and after a long context. But a forward "
    "of one token uses little of a device, and the next request waits until this one has ended: "
    "m2 computes many requests in each step."
)


def main() -> None:
    """Answer each question with the cache and without, and show how both costs grow."""
    args = parser("One request at a time, with a KV cache.", requests=2, max_tokens=48).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    with open_engine(LLMEngine, config, console) as engine:
        naive = LLMEngine(engine.config, engine.loaded, use_cache=False)
        use_virtual_time(naive, in_virtual_time(engine, args, console))
        say(console, LOOK)
        with recorded(engine, args, console):
            for question in chats(args.requests):
                message = {"role": "user", "content": question}
                prompt = engine.input_processor.apply_chat_template([message])
                console.print(f"\n[bold]> {question}[/]", highlight=False)
                runners = [Runner("with the KV cache", engine), Runner("full recompute", naive)]
                race(runners, prompt, params, console, args.check)
                compare(runners, console)
        console.print(growth(engine, naive))
        goes_on(console, SEEN, "m1_single")


def compare(runners: list[Runner], console: Console) -> None:
    """Print the costs of one answer, with the cache and without."""
    table = summary_table("", "", "tokens/s", "virtual time", "this machine", "tokens computed")
    for runner in runners:
        tokens = len(runner.final.outputs[0].token_ids)
        rate = tokens / runner.seconds
        times = seconds(runner.seconds), seconds(runner.machine_seconds)
        table.add_row(runner.name, f"{rate:.1f}", *times, f"{runner.computed}")
    console.print(table)
    cached, recomputed = runners
    same = cached.final.outputs[0].token_ids == recomputed.final.outputs[0].token_ids
    console.print(
        f"The text is {'the same' if same else 'NOT the same'}. "
        f"The engine with the cache is {recomputed.seconds / cached.seconds:.1f} times as fast.",
        highlight=False,
    )
