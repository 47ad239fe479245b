"""Chats that arrive in bursts and are served together: `python -m m2_continuous.demo`."""

from __future__ import annotations

from common import EngineConfig
from common.displays.comparison import Figure, comparison, counter, run_milestones, workload_of
from common.displays.demo import (
    engine_options,
    goes_on,
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
)
from common.displays.serving import Arrivals, questions, serve

from .. import LLMEngine
from .panels import Panels

FIGURES: dict[str, Figure] = {
    "requests in flight at once": lambda r: str(r.most_running),
    "padding tokens computed": counter("padding_tokens"),
    "KV memory held and not used": lambda r: f"{r.kv_waste or 0:.1%}",
}
LOOK = (
    "Look at the rows of the slot cache: a request joins as soon as a row is free, and the last "
    "row moves when a request ends. While a prompt is computed, the others get no token."
)
SEEN = (
    "One forward computes a token of each request, so the same requests take less time. But each "
    "row reserves memory for the longest request, and rows are padded: m3 gives out memory page by "
    "page."
)


def main() -> None:
    """Serve the chats live; then compare this milestone with the one below on the same requests."""
    args = parser("Continuous batching over a slot cache.", requests=12, max_tokens=32).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=8)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = Arrivals(questions(args.requests), burst=3, every=5)
        with recorded(engine, args, console):
            prompts = serve(engine, arrivals, Panels(engine, console), args, console)
        workload = workload_of(engine, prompts, args, costs)
    results = run_milestones({"m1_single": workload, "m2_continuous": workload}, console)
    console.print(comparison("all requests at once", results, FIGURES, costs))
    goes_on(console, SEEN, "m2_continuous")
