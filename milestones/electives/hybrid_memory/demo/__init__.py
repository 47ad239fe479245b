"""Pages of a model with windows; snapshots of states; conversations, live, and on m5.

`python -m milestones demo hybrid_memory`
"""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from common import EngineConfig, SamplingParams, UnsupportedModelError  # noqa: E402
from common.displays.comparison import (  # noqa: E402
    Figure,
    counter,
    workload_of,
)
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

from ....chain import below, load  # noqa: E402
from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402
from .states import show_states  # noqa: E402

NAME = __name__.split(".")[-2]
WINDOWED = "tiny-gemma3_text"  # random weights: its text means nothing, and its pages are real
PROMPT, CHUNK = 160, 32  # tokens
FIGURES: dict[str, Figure] = {
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
}
LOOK = "Look at the pages of layers with windows: a request gives back what has left the window."
SEEN = (
    "Layers with windows hold few pages, however long the text is. A model without windows is "
    "served as by the milestone below."
)


def main() -> None:
    """Show pages in windows, and snapshots. Then serve conversations live, and on m5."""
    args = parser("Groups of layers with windows.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        show_windows(console, args.readable)
        show_states(console, args.readable)
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console)
    say(console, f"\n{SEEN}")


def show_windows(console: Console, readable: bool) -> None:
    """Compute one long prompt in chunks, and print the pages that each group holds."""
    config = EngineConfig(
        model=WINDOWED, device="cpu", readable=readable,
        page_size=8, num_pages=256, max_num_batched_tokens=CHUNK,
    )  # fmt: skip
    with LLMEngine(config) as engine:
        groups = engine.core.runner.kv_pool.groups
        shown = Table(title=f"pages of one request: {WINDOWED}, pages of {config.page_size} tokens")
        for title in (
            "step",
            "tokens",
            *(_name(group.window) for group in groups),
            "together",
            "all layers full",
        ):
            shown.add_column(title, justify="right")
        engine.add_request(
            [5 + number % 250 for number in range(PROMPT)],
            SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        )
        kv_cache = engine.core.scheduler.kv_cache
        while engine.has_unfinished_requests():
            engine.step()
            for request in engine.core.scheduler.running:
                assert request.row is not None
                blocks = len(kv_cache.pages_of(request))
                windows = range(len(groups) - 1)
                held = [blocks, *(len(kv_cache.table.in_use(n, request.row)) for n in windows)]
                row = [engine.stats().num_steps, request.num_computed_tokens, *held, sum(held)]
                shown.add_row(*map(str, [*row, blocks * len(groups)]))
        console.print(shown)
    console.print(
        "The last column: full attention in all layers. The memory that is saved "
        "serves other requests. The highest milestone refuses the model:"
    )
    milestone = below(NAME)
    assert milestone is not None, "an elective lies on a milestone"
    try:
        load(milestone).LLMEngine(config)
    except UnsupportedModelError as error:
        console.print(f"  {error}\n", highlight=False)


def _name(window: int | None) -> str:
    return "full attention" if window is None else f"window of {window}"
