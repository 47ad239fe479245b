"""Many chats in little memory, page by page: `python -m m3_paged.demo`."""

from __future__ import annotations

from dataclasses import replace

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

PAGE_SIZE = 4  # tokens
ROWS_BELOW = 4  # requests that the milestone below holds in the same memory
MAX_MODEL_LEN = 320
LIVE_PAGES = 68  # so few that a request is retracted; the comparison has more
FIGURES: dict[str, Figure] = {
    "requests in flight at once": lambda r: str(r.most_running),
    "padding tokens computed": counter("padding_tokens"),
    "KV memory held and not used": lambda r: f"{r.kv_waste or 0:.1%}",
    "retractions": counter("num_retractions"),
}
LOOK = (
    "Look at the page tables: a request takes a page when it needs one. When no page is free, the "
    "newest request gives its pages back, and is computed again later."
)
SEEN = (
    "In the same memory, many more requests run at once, and no padding is computed. But prompts "
    "that begin alike are computed again and again: m4 keeps their pages in a tree."
)


def main() -> None:
    """Serve the chats live; then compare this milestone with the one below, in equal memory."""
    args = parser("Pages, mixed batches, retraction.", requests=24, max_tokens=40).parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32, page_size=PAGE_SIZE, num_pages=LIVE_PAGES,
    )  # fmt: skip
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = Arrivals(questions(args.requests), burst=6, every=3)
        with recorded(engine, args, console):
            prompts = serve(engine, arrivals, Panels(engine, console), args, console)
        live = workload_of(engine, prompts, args, costs)
    pages = ROWS_BELOW * MAX_MODEL_LEN // PAGE_SIZE
    paged = replace(live, config={**live.config, "num_pages": pages})
    rows = replace(paged, config={**paged.config, "max_num_seqs": ROWS_BELOW})
    results = run_milestones({"m2_continuous": rows, "m3_paged": paged}, console)
    title = f"all requests at once, in a KV memory of {ROWS_BELOW * MAX_MODEL_LEN} tokens"
    console.print(comparison(title, results, FIGURES, costs))
    goes_on(console, SEEN, "m3_paged")
