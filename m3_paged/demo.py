"""Many chats in little memory, page by page: `python -m m3_paged.demo`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common import EngineConfig, SamplingParams, TokensPrompt
from common.dashboard import Dashboard, summary_table
from common.demo import chats, machine, make_console, open_engine, parser, recorded
from common.workload import Workload, WorkloadResult, run_rung

from . import LLMEngine
from .kv_cache import PADDING_PAGE

STEPS_BETWEEN_BURSTS = 3
BURST = 6  # requests that arrive together
PAGE_SIZE = 4  # tokens
ROWS_BELOW = 4  # requests that the rung below holds in the same memory
MAX_MODEL_LEN = 320
OWNER_STYLES = ("cyan", "magenta", "yellow", "green", "blue", "bright_red", "bright_cyan", "white")


def main() -> None:
    """Serve the chats live; then the same ones here and on the rung below, in equal memory."""
    args = parser("Pages, mixed batches, retraction.", requests=24, max_tokens=40).parse_args()
    console = make_console(args)
    num_pages = ROWS_BELOW * MAX_MODEL_LEN // PAGE_SIZE
    shared: dict[str, Any] = {
        "model": args.model,
        "device": args.device,
        "max_model_len": MAX_MODEL_LEN,
    }
    paged: dict[str, Any] = {"max_num_seqs": 32, "page_size": PAGE_SIZE, "num_pages": num_pages}
    with open_engine(LLMEngine, EngineConfig(**shared, **paged), console) as engine:
        console.print(f"[bold]m3_paged[/] · {engine.loaded.name} · {machine()}", highlight=False)
        questions = chats(args.requests)
        prompts = [
            engine.input_processor.apply_chat_template([{"role": "user", "content": question}])
            for question in questions
        ]
        with recorded(engine, args, console):
            Serving(engine, console, args).run(questions, prompts)
        shared["model"] = engine.loaded.name
        shared["max_model_len"] = engine.config.max_model_len
    results = {}
    for rung, config in (("m2_continuous", {"max_num_seqs": ROWS_BELOW}), ("m3_paged", paged)):
        workload = Workload(
            prompts=[list(prompt.prompt_token_ids) for prompt in prompts],
            max_tokens=[args.max_tokens] * len(prompts),
            config={**shared, **config},
        )
        with console.status(f"the same requests on {rung} …"):
            results[rung] = run_rung(rung, workload)
    console.print(verdict(results, ROWS_BELOW * MAX_MODEL_LEN))


class Serving:
    """One run of the engine under the dashboard."""

    def __init__(self, engine: LLMEngine, console: Console, args: Namespace) -> None:
        self.engine = engine
        self.console = console
        self.args = args

    def run(self, questions: list[str], prompts: list[TokensPrompt]) -> None:
        """Requests arrive in bursts; the engine steps until all have ended."""
        params = SamplingParams(max_tokens=self.args.max_tokens, temperature=0)
        arrivals = list(zip(questions, prompts, strict=True))[::-1]
        steps = 0
        with Dashboard(self.engine, "requests", self.console, self.panels) as dashboard:
            while arrivals or self.engine.has_unfinished_requests():
                if steps % STEPS_BETWEEN_BURSTS == 0:
                    for question, prompt in reversed(arrivals[-BURST:]):
                        name = f"r{len(dashboard.entries)}"
                        dashboard.add(self.engine.add_request(prompt, params, name), question)
                    del arrivals[-BURST:]
                dashboard.step()
                steps += 1
                if self.args.check:
                    self.engine.check_invariants()

    def panels(self) -> Iterable[RenderableType]:
        """Whose page is which, and what the scheduler promises and takes back."""
        kv_cache = self.engine.scheduler.kv_cache
        cells = [("·", "dim")] * (kv_cache.allocator.num_pages + 1)
        cells[PADDING_PAGE] = ("#", "dim")
        for request in self.engine.scheduler.running:
            number = int(request.request_id[1:])
            cell = (chr(ord("A") + number % 26), OWNER_STYLES[number % len(OWNER_STYLES)])
            for page in kv_cache.pages_of(request):
                cells[page] = cell
        pages = Text()
        for character, style in cells:
            pages.append(character, style)
        title = f"pages of {PAGE_SIZE} tokens: A is r0, B r1 … · free # padding"
        yield Panel(pages, title=title, title_align="left")
        stats = self.engine.stats()
        used, reserved = stats.kv_tokens_used, stats.kv_tokens_reserved
        yield Text(
            f"{stats.kv_pages_free} of {stats.kv_pages_total} pages free · {used} tokens in "
            f"{reserved} slots held · {stats.num_retractions} retractions · expecting "
            f"{self.engine.scheduler.admission.new_token_ratio:.0%} of what may still come"
        )


def verdict(results: dict[str, WorkloadResult | None], memory: int) -> Table:
    """Both rungs on the same requests, in the same KV memory."""
    rungs = {name: result for name, result in results.items() if result is not None}
    table = summary_table(f"\nin a KV memory of {memory} tokens", "", *rungs)

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    row("requests in flight at once", *(str(r.most_running) for r in rungs.values()))
    row("KV memory held and not used", *(f"{r.kv_waste or 0:.1%}" for r in rungs.values()))
    row("padding tokens computed", *(str(r.stats["padding_tokens"]) for r in rungs.values()))
    row("retractions", *(str(r.stats["num_retractions"]) for r in rungs.values()))
    row("throughput", *(f"{r.tokens_per_second:.1f} tokens/s" for r in rungs.values()))
    slowest = next(iter(rungs.values())).tokens_per_second
    row("ratio", *(f"{r.tokens_per_second / slowest:.2f} x" for r in rungs.values()))
    return table


if __name__ == "__main__":
    main()
