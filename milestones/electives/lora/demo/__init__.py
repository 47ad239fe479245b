"""Requests of four adapters in two slots, live; then without adapters, also on m5.

`python -m milestones demo lora`
"""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

import copy  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from pathlib import Path  # noqa: E402

from rich.console import Console, RenderableType  # noqa: E402
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from common import EngineConfig, LoRARequest, Prompt, SamplingParams  # noqa: E402
from common.displays.comparison import Figure, counter, workload_of  # noqa: E402
from common.displays.demo import (  # noqa: E402
    engine_options,
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.serving import serve  # noqa: E402
from common.tracing.data import TraceData  # noqa: E402

from ....lab.instruments.random_adapter import write_adapter  # noqa: E402
from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..kv_cache import ADAPTER_KEY  # noqa: E402
from ..radix_cache import TreeNode  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402
from .panels import Panels  # noqa: E402

NAME = __name__.split(".")[-2]
ADAPTERS = "ABCD"
SIZE = 0.02  # of the random matrices: they change answers, and leave words
FIGURES: dict[str, Figure] = {
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
}
LOOK = (
    "Look at the slots: requests of two adapters and of the model alone share a step. The others "
    "wait for a slot."
)
SEEN = (
    "One model in memory serves all adapters. An adapter costs a slot, its copy and two products."
)


class DemoEngine(LLMEngine):
    """An engine in which four of five requests have an adapter, in turn."""

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> str:
        number = int((request_id or "r0").lstrip("r")) % (len(ADAPTERS) + 1)
        if number > 0:
            adapter = self.adapters.adapters[ADAPTERS[number - 1]]
            lora_request = LoRARequest(adapter.name, adapter.path)
        return super().add_request(prompt, params, request_id, lora_request=lora_request)


class TreePanels(Panels):
    """The panels of m4. A prefix of an adapter begins with the number of its load, as in #3."""

    def _label(self, node: TreeNode) -> Text:
        shown, number = copy.copy(node), node.tokens[0] // ADAPTER_KEY
        shown.tokens = [token % ADAPTER_KEY for token in node.tokens]
        label = super()._label(shown)
        named = Text(f"#{number} " if number else "", "plan", no_wrap=True, overflow="ellipsis")
        return named.append_text(label)


class SlotPanels:
    """The slots, the requests of each, and the waiting requests; above the panels of m5."""

    def __init__(self, engine: LLMEngine, trace: TraceData, console: Console) -> None:
        self.engine = engine
        self.live = LivePanels(engine, trace, console)
        self.live.panels = TreePanels(engine, console)

    def __call__(self) -> Iterable[RenderableType]:
        scheduler = self.engine.core.scheduler
        names = {slot: adapter.name for adapter, slot in scheduler.slots.resident.items()}
        table = Table(box=None, pad_edge=False)
        for column in ("slot", "adapter", "requests"):
            table.add_column(column)
        for slot in range(self.engine.config.max_loras + 1):
            name = names.get(slot)
            running = [r.request_id for r in scheduler.running if name_of(r.adapter) == name]
            shown = "the model alone" if slot == 0 else name or "free"
            table.add_row(f"{slot}", shown, " ".join(running if slot in (0, *names) else ()))
        waiting = Counter(name_of(r.adapter) or "none" for r in scheduler.waiting)
        table.add_row("", "waiting", " ".join(f"{n} x {name}" for name, n in waiting.items()))
        title = f"adapters: {scheduler.slots.num_loads} loaded into slots so far"
        yield Panel(table, title=title, title_align="left")
        yield from self.live()


def name_of(adapter: object) -> str | None:
    """Return the name of an adapter; None without one."""
    return getattr(adapter, "name", None)


def main() -> None:
    """Serve conversations with adapters, live. Then serve them without adapters, also on m5."""
    args = parser("Many adapters share a batch.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_num_seqs=6, page_size=8, num_pages=256,
        max_loras=2, max_lora_rank=4,
    )  # fmt: skip
    with (
        open_engine(DemoEngine, config, console) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        for seed, name in enumerate(ADAPTERS):
            path = write_adapter(Path(folder, name), engine.adapters.shapes, seed, size=SIZE)
            engine.add_lora(LoRARequest(name, path))
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            prompts = serve(
                engine, arrivals, SlotPanels(engine, trace.data, console), args, console
            )
        loads, steps = engine.core.scheduler.slots.num_loads, engine.stats().num_steps
        console.print(
            f"{len(prompts)} requests of {len(ADAPTERS)} random adapters and of the model alone: "
            f"{loads} loads into {engine.config.max_loras} slots, in {steps} steps"
        )
        title = "without adapters, all requests at once"
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console, title)
    say(console, f"\n{SEEN}")
