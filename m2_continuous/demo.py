"""A staggered stream of chats, served together: `python -m m2_continuous.demo`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common import EngineConfig, EngineStats, SamplingParams, TokensPrompt
from common.dashboard import Dashboard, bar, sparkline, summary_table
from common.demo import chats, machine, make_console, open_engine, parser, recorded
from common.workload import Workload, WorkloadResult, run_rung

from . import LLMEngine

STEPS_BETWEEN_BURSTS = 5
BURST = 3  # requests that arrive together


def main() -> None:
    """Serve the chats live, then the same ones on the rung below, and compare."""
    args = parser("Continuous batching over a slot cache.", requests=12, max_tokens=32).parse_args()
    console = make_console(args)
    config = EngineConfig(model=args.model, device=args.device, max_num_seqs=8)
    with open_engine(LLMEngine, config, console) as engine:
        console.print(
            f"[bold]m2_continuous[/] · {engine.loaded.name} · {machine()}", highlight=False
        )
        questions = chats(args.requests)
        prompts = [
            engine.input_processor.apply_chat_template([{"role": "user", "content": question}])
            for question in questions
        ]
        served = Serving(engine, console, args)
        with recorded(engine, args, console):
            served.run(questions, prompts)
        workload = Workload(
            prompts=[list(prompt.prompt_token_ids) for prompt in prompts],
            max_tokens=[args.max_tokens] * len(prompts),
            config={"model": engine.loaded.name, "device": args.device},
        )
        with console.status("the same requests on m1_single, one at a time …"):
            below = run_rung("m1_single", workload)
        console.print(served.verdict(below))


class Serving:
    """One run of the engine under the dashboard, and what it measured."""

    def __init__(self, engine: LLMEngine, console: Console, args: Namespace) -> None:
        self.engine = engine
        self.console = console
        self.args = args
        self.history: list[EngineStats] = []  # after each step
        self.output_tokens = 0
        self.seconds = 0.0

    def run(self, questions: list[str], prompts: list[TokensPrompt]) -> None:
        """Requests arrive in bursts; the engine steps until all have ended."""
        params = SamplingParams(max_tokens=self.args.max_tokens, temperature=0)
        arrivals = list(zip(questions, prompts, strict=True))[::-1]
        with Dashboard(self.engine, "requests", self.console, self.panels) as dashboard:
            while arrivals or self.engine.has_unfinished_requests():
                if len(self.history) % STEPS_BETWEEN_BURSTS == 0:
                    for question, prompt in reversed(arrivals[-BURST:]):
                        name = f"r{len(dashboard.entries)}"
                        dashboard.add(self.engine.add_request(prompt, params, name), question)
                    del arrivals[-BURST:]
                dashboard.step()
                self.history.append(self.engine.stats())
                if self.args.check:
                    self.engine.check_invariants()
            self.output_tokens, self.seconds = dashboard.output_tokens, dashboard.elapsed

    def panels(self) -> Iterable[RenderableType]:
        """Who owns which row, how much of it is used, and how many rows were taken over time."""
        kv_cache = self.engine.scheduler.kv_cache
        width = max(10, self.console.width - 44)
        rows = Table(box=None, pad_edge=False, show_header=False)
        for row in range(kv_cache.num_rows):
            owner = kv_cache.rows[row] if row < len(kv_cache.rows) else None
            used = owner.num_computed_tokens if owner else 0
            share = used / kv_cache.row_tokens
            style = "dim" if owner is None else "default"
            rows.add_row(
                Text(f"row {row}", style),
                Text(owner.request_id if owner else "free", style),
                bar([(share, "█", "cyan"), (1 - share, "░" if owner else "·", style)], width),
                Text(f"{used:4d} of {kv_cache.row_tokens}", style),
            )
        yield Panel(rows, title="the slot cache: █ used ░ reserved · free", title_align="left")
        running = [float(stats.num_running) for stats in self.history]
        yield Text("rows taken over time  ") + sparkline(running, width, kv_cache.num_rows)

    def verdict(self, below: WorkloadResult | None) -> Table:
        """Throughput against the rung below, and what batching cost in padding and memory."""
        stats = self.history[-1]
        busy = [s for s in self.history if s.num_running]
        reserved = sum(s.kv_tokens_reserved for s in busy)
        used = sum(s.kv_tokens_used for s in busy)
        prefill_positions = stats.prefill_tokens + stats.padding_tokens
        table = summary_table("\nm2_continuous", "", "value")
        rate = self.output_tokens / self.seconds
        table.add_row("throughput, requests joining as they come", f"{rate:.1f} tokens/s")
        if below is not None:
            table.add_row(
                "m1_single on the same requests", f"{below.tokens_per_second:.1f} tokens/s"
            )
            table.add_row("ratio", f"{rate / below.tokens_per_second:.1f} x")
        table.add_row(
            "mean rows taken",
            f"{sum(s.num_running for s in busy) / max(len(busy), 1):.1f} of "
            f"{self.engine.scheduler.kv_cache.num_rows}",
        )
        table.add_row(
            "padding computed in prefill",
            f"{stats.padding_tokens} of {prefill_positions} positions",
        )
        table.add_row(
            "KV memory reserved and not used", f"{100 * (1 - used / max(reserved, 1)):.1f} %"
        )
        return table


if __name__ == "__main__":
    main()
