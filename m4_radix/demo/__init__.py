"""Agents with a shared system prompt, on a radix tree: `python -m m4_radix.demo`."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.table import Table

from common import EngineConfig
from common.clock import StepCosts
from common.config import POLICIES
from common.displays.comparison import (
    Figure,
    comparison,
    counter,
    run_milestones,
    seconds,
    workload_of,
)
from common.displays.demo import (
    engine_options,
    goes_on,
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.serving import serve
from common.displays.shapes import summary_table
from common.displays.workload import Workload, WorkloadResult, run
from common.virtual_time import use_virtual_time

from .. import LLMEngine
from .agents import conversations
from .panels import Panels

PAGE_SIZE = 8  # tokens
LIVE_PAGES = 112  # so few that the tree evicts pages; the comparison has more
FIGURES: dict[str, Figure] = {
    "prompt tokens computed": counter("prefill_tokens"),
    "prompt tokens reused": counter("cached_prompt_tokens"),
    "hit rate": lambda r: f"{r.hit_rate:.0%}",
    "TTFT, median": lambda r: seconds(median(r.first_token_seconds)),
}
ANSWER_TOKENS = 8  # for each of the requests that compare policies
ABOUT_POLICIES = (
    "The users talk to the agents in turn, and memory has no room for all agents. Under lpm and "
    "dfs-weight, the requests of one agent come one after the other, so they find its pages before "
    "they are evicted."
)
LOOK = (
    "Look at the tree: prompts that begin alike share its pages, and only what is new is computed. "
    "When memory is short, pages that no request uses are evicted."
)
SEEN = (
    "Most prompt tokens come from the cache, so a first token comes earlier. But while the host "
    "plans a step, the device waits: m5 plans the next step while a forward runs."
)


def main() -> None:
    """Serve conversations live; then compare milestones, and policies, on the same requests."""
    args = parser("A radix tree of cached prefixes.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_num_seqs=6, page_size=PAGE_SIZE,
        num_pages=LIVE_PAGES,
    )  # fmt: skip
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console):
            prompts = serve(engine, arrivals, Panels(engine, console), args, console)
        live = workload_of(engine, prompts, args, costs)
        workload = replace(live, config={**live.config, "num_pages": 256})
        results = run_milestones({"m3_paged": workload, "m4_radix": workload}, console)
        console.print(comparison("all requests at once, equal KV memory", results, FIGURES, costs))
        first_turns = replace(workload, prompts=[
            list(engine.input_processor.apply_chat_template(talk).prompt_token_ids)
            for talk in arrivals.talks
        ], max_tokens=[ANSWER_TOKENS] * len(arrivals.talks))  # fmt: skip
        compare_policies(first_turns, engine, costs, console)
    goes_on(console, SEEN, "m4_radix")


def compare_policies(
    workload: Workload, engine: LLMEngine, costs: StepCosts, console: Console
) -> None:
    """Serve requests in memory for one and a half of them: now the order of admission matters."""
    tokens = max(map(len, workload.prompts)) + max(workload.max_tokens)
    small = {**workload.config, "num_pages": 3 * tokens // 2 // PAGE_SIZE, "seed": 0}
    results = {}
    for policy in POLICIES:
        with console.status(f"the same requests by {policy} …"):
            config = EngineConfig(**{**small, "schedule_policy": policy})
            with LLMEngine(config, engine.loaded) as policed:
                use_virtual_time(policed, costs)
                results[policy] = run(policed, workload)
    console.print(policies(results, small["num_pages"]))
    say(console, ABOUT_POLICIES)


def policies(results: dict[str, WorkloadResult], num_pages: int) -> Table:
    """Return a table with a row for each policy."""
    title = f"\nthe first questions by policy, with {num_pages} pages of KV memory"
    table = summary_table(title, "policy", "hit rate", "prefill tokens", "TTFT p50", "tokens/s")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.hit_rate:.0%}",
            str(result.stats["prefill_tokens"]),
            seconds(median(result.first_token_seconds)),
            f"{result.tokens_per_second:.1f}",
        )
    return table
