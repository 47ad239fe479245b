"""Agents that talk over shared prompts, on a radix tree: `python -m m4_radix.demo`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from statistics import median
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from common import EngineConfig, SamplingParams
from common.config import POLICIES
from common.dashboard import Dashboard, bar, summary_table
from common.demo import chats, machine, make_console, open_engine, parser, recorded
from common.workload import Workload, WorkloadResult, run, run_rung

from . import LLMEngine
from .kv_cache import PADDING_PAGE
from .radix_cache import TreeNode

RULES = (
    "You work for a help desk that people all over the world write to. Some are in a hurry, "
    "some are children, some read English as their third language. Be polite, be brief, and be "
    "right: if you do not know, say so and name who might. Never ask for a name, an address or a "
    "password. Never promise what others must keep. Use no lists and no headings, only sentences. "
    "What follows says what your own desk does. "
)
AGENTS = (
    "You are a patient physics teacher. Answer in two short sentences. Use plain words, give one "
    "example from daily life, never use a formula, and end with a question to the student.",
    "You are a travel guide for families with small children. Be friendly and practical. Name one "
    "place, say how long a visit takes, what it costs, and what to do when it rains.",
    "You are a careful code reviewer. Name the most serious problem first. Say why it is one, show "
    "how to mend it in a line, and say nothing about style unless you are asked.",
)
FOLLOW_UP = "Say that again in one sentence."
STEPS_BETWEEN_ARRIVALS = 2
PAGE_SIZE = 8  # tokens
TALK_TOKENS = 260  # for questions and answers, whatever the tokenizer
MAX_NUM_SEQS = 6
NUM_PAGES = 256
BAR_TOKENS = 280  # prompt and output that fill a request's bar


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
            serving.run()
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


class Serving:
    """One run of the engine under the dashboard."""

    def __init__(self, engine: LLMEngine, console: Console, args: Namespace) -> None:
        self.engine = engine
        self.console = console
        self.args = args
        self.prompts: list[list[int]] = []
        self.tree_lines = max(4, console.height // 3)

    def run(self) -> None:
        """Conversations of two turns arrive one by one; the engine steps until all have ended."""
        talks = {}
        # A text has at least as many characters as tokens: cut so, it fits the smallest model.
        longest = (self.engine.config.max_model_len or 0) - TALK_TOKENS
        agents = [(RULES + agent)[:longest] for agent in AGENTS]
        arrivals = list(enumerate(chats(self.args.requests)))[::-1]
        steps = 0
        lines = self.tree_lines + MAX_NUM_SEQS + 9
        with Dashboard(
            self.engine, "requests", self.console, self.panels, panel_lines=lines
        ) as dashboard:
            while arrivals or self.engine.has_unfinished_requests():
                if arrivals and steps % STEPS_BETWEEN_ARRIVALS == 0:
                    number, question = arrivals.pop()
                    system = {"role": "system", "content": agents[number % len(agents)]}
                    talk = [system, {"role": "user", "content": question}]
                    talks[self._say(dashboard, talk)] = talk
                for output in dashboard.step():
                    talk = talks.get(output.request_id, [])
                    if output.finished and len(talk) == 2:
                        talk.append({"role": "assistant", "content": output.outputs[0].text})
                        talk.append({"role": "user", "content": FOLLOW_UP})
                        talks[self._say(dashboard, talk)] = talk
                steps += 1
                if self.args.check:
                    self.engine.check_invariants()

    def _say(self, dashboard: Dashboard, talk: list[dict[str, str]]) -> str:
        """Send a conversation so far to the engine."""
        prompt = self.engine.input_processor.apply_chat_template(talk)
        name = f"r{len(self.prompts)}"
        self.prompts.append(list(prompt.prompt_token_ids))
        params = SamplingParams(max_tokens=self.args.max_tokens, temperature=0)
        dashboard.add(self.engine.add_request(prompt, params, name), talk[-1]["content"])
        return name

    def panels(self) -> Iterable[RenderableType]:
        """What each request has found, the tree, and whose page is which."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for request in self.engine.scheduler.running:
            cached = request.num_cached_tokens or 0
            computed = min(request.num_computed_tokens, request.num_prompt_tokens) - cached
            parts = (cached, "=", "green"), (computed, "#", "yellow"), (
                request.num_output_tokens, "+", "cyan",
            )  # fmt: skip
            shares = [(count / BAR_TOKENS, mark, style) for count, mark, style in parts]
            table.add_row(request.request_id, bar(shares, self.console.width - 10))
        title = "tokens: = cached # computed + generated"
        yield Panel(table, title=title, title_align="left")
        yield Panel(self._tree(), title="tree: pages · locks · hits, text", title_align="left")
        yield self._pages()
        stats = self.engine.stats()
        reused, computed = stats.cached_prompt_tokens, stats.prefill_tokens
        yield Text(
            f"{reused} prompt tokens reused, {computed} computed: hit rate "
            f"{reused / max(1, reused + computed):.0%}"
        )

    def _tree(self) -> Tree:
        """The nodes used last, as many as there are lines, in their places."""
        nodes = list(self.engine.scheduler.kv_cache.radix_cache.nodes())
        latest = sorted(nodes, key=lambda node: (-node.last_used, node.end))
        shown = set(latest[: self.tree_lines - 1])
        left_out = len(nodes) - len(shown)
        root = Tree(Text(f"{len(nodes)} nodes" + (f", {left_out} not shown" * bool(left_out))))
        branches = {self.engine.scheduler.kv_cache.radix_cache.root: root}
        for node in nodes:  # parents first; used as late as their children, they are shown too
            if node in shown and node.parent in branches:
                branches[node] = branches[node.parent].add(self._label(node))
        return root

    def _label(self, node: TreeNode) -> Text:
        text = " ".join(str(self.engine.loaded.tokenizer.decode(node.tokens)).split())
        style = "bold cyan" if node.lock_count else "dim"
        facts = f"{len(node.pages)} · {node.lock_count} · {node.hits}  "
        label = Text(facts, style, no_wrap=True, overflow="ellipsis")
        return label.append(text, "default")

    def _pages(self) -> Panel:
        """Whose page is which."""
        kv_cache = self.engine.scheduler.kv_cache
        cells = [("o", "yellow")] * (kv_cache.allocator.num_pages + 1)
        cells[PADDING_PAGE] = ("#", "dim")
        for page in kv_cache.allocator.free_pages:
            cells[page] = ("·", "dim")
        for node in kv_cache.radix_cache.nodes():
            for page in node.pages:
                cells[page] = ("T", "bold cyan") if node.lock_count else ("c", "green")
        pages = Text()
        for character, style in cells:
            pages.append(character, style)
        title = "pages: o a request's own, T of the tree in use, c cached, · free, # padding"
        return Panel(pages, title=title, title_align="left")


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
