"""Agents that talk over shared prompts, on a radix tree: `python -m m4_radix.demo`."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from common import EngineConfig
from common.config import POLICIES
from common.dashboard import summary_table
from common.demo import machine, make_console, open_engine, parser, recorded
from common.workload import Workload, WorkloadResult, run, run_rung

from . import LLMEngine
from .panels import Panels
from .serving import Serving

PAGE_SIZE = 8  # tokens
MAX_NUM_SEQS = 6
NUM_PAGES = 256


def main() -> None:
    """Serve the conversations live; then the same requests on the rung below, and by policy."""
    args = parser("A radix tree of cached prefixes.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config: dict[str, Any] = {
        "model": args.model, "device": args.device,
        "max_num_seqs": MAX_NUM_SEQS, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES,
    }  # fmt: skip
    with open_engine(LLMEngine, EngineConfig(**config), console) as engine:
        console.print(f"[bold]m4_radix[/] · {engine.loaded.name} · {machine()}", highlight=False)
        serving = Serving(engine, console, args)
        with recorded(engine, args, console):
            panels = Panels(engine, console)
            serving.run(panels, panels.num_lines)
        config["model"] = engine.loaded.name
        config["max_model_len"] = engine.config.max_model_len
        outputs = [args.max_tokens] * len(serving.prompts)
        workload = Workload(serving.prompts, outputs, config=config)
        compare_rungs(workload, console)
        compare_policies(workload, engine, console)


def compare_rungs(workload: Workload, console: Console) -> None:
    """The same requests on the rung below and here, each in a process of its own."""
    results = {}
    for rung in ("m3_paged", "m4_radix"):
        with console.status(f"the same requests on {rung} …"):
            results[rung] = run_rung(rung, workload)
    console.print(verdict(results))


def compare_policies(workload: Workload, engine: LLMEngine, console: Console) -> None:
    """The same requests in memory for just two of them: now it matters who goes first."""
    tokens = max(map(len, workload.prompts)) + max(workload.max_tokens)
    config = {**workload.config, "num_pages": 2 * tokens // PAGE_SIZE, "seed": 0}
    results = {}
    for policy in POLICIES:
        with console.status(f"the same requests by {policy} …"):
            small = EngineConfig(**{**config, "schedule_policy": policy})
            results[policy] = run(LLMEngine(small, engine.loaded), workload)
    console.print(policies(results, small))


def verdict(results: dict[str, WorkloadResult | None]) -> Table:
    """Both rungs on the same requests, all there at once."""
    rungs = {name: result for name, result in results.items() if result is not None}
    table = summary_table("\nall requests at once, equal KV memory", "", *rungs)
    reused = {name: r.stats["cached_prompt_tokens"] for name, r in rungs.items()}
    first = next(iter(rungs.values()))

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    row("prompt tokens computed", *(str(r.stats["prefill_tokens"]) for r in rungs.values()))
    row("prompt tokens reused", *(str(count) for count in reused.values()))
    row("hit rate", *(f"{hit_rate(r):.0%}" for r in rungs.values()))
    row("TTFT, median", *(f"{median(r.first_token_seconds):.2f} s" for r in rungs.values()))
    row("throughput", *(f"{r.tokens_per_second:.1f} tokens/s" for r in rungs.values()))
    ratios = (r.tokens_per_second / first.tokens_per_second for r in rungs.values())
    row("ratio", *(f"{ratio:.2f} x" for ratio in ratios))
    return table


def policies(results: dict[str, WorkloadResult], config: EngineConfig) -> Table:
    """What each policy made of the same requests."""
    title = f"\nby policy, with {config.num_pages} pages of {PAGE_SIZE} tokens of KV memory"
    table = summary_table(title, "policy", "hit rate", "prefill tokens", "TTFT p50", "tokens/s")
    for name, result in results.items():
        table.add_row(
            name,
            f"{hit_rate(result):.0%}",
            str(result.stats["prefill_tokens"]),
            f"{median(result.first_token_seconds):.2f} s",
            f"{result.tokens_per_second:.1f}",
        )
    return table


def hit_rate(result: WorkloadResult) -> float:
    """The share of the prompt tokens that need not be computed."""
    reused = result.stats["cached_prompt_tokens"]
    return reused / max(1, reused + result.stats["prefill_tokens"])


if __name__ == "__main__":
    main()
