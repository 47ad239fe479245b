"""Steps that overlap, live, and against the serial loop: `python -m m5_overlap.demo`."""

from __future__ import annotations

from argparse import Namespace

from common import EngineConfig
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
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.serving import serve
from common.displays.workload import percentile

from .. import LLMEngine
from .agents import conversations
from .both_loops import compare_in_virtual_time, compare_on_machine
from .lanes import LivePanels

MILESTONES = ("m1_single", "m2_continuous", "m3_paged", "m4_radix", "m5_overlap")
FIGURES: dict[str, Figure] = {  # of the milestones
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
    "TTFT p50": lambda r: seconds(percentile(r.first_token_seconds, 50)),
    "ITL p95": lambda r: seconds(percentile(r.inter_token_seconds, 95)),
}
LOOK = (
    "Look at the lanes: while a forward runs, the host processes the step before it and launches "
    "the step after it."
)
SEEN = (
    "The device hardly ever waits for the host. This is the last milestone. The electives go on "
    "from here: python -m milestones list"
)


def arguments() -> Namespace:
    """Return what the command line asks for."""
    result = parser("Steps that overlap.", requests=12, max_tokens=24)
    result.add_argument("--ladder", action="store_true", help="compare all milestones")
    return result.parse_args()


def main() -> None:
    """Serve conversations live; then the same requests by the serial and the overlapped loop."""
    args = arguments()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        workload = workload_of(engine, prompts, args, costs)
        compare_on_machine(workload, engine.loaded, runs_on_gpu(engine), console)
        compare_in_virtual_time(workload, engine.loaded, costs, console)
    if args.ladder:
        results = run_milestones(dict.fromkeys(MILESTONES, workload), console)
        short = {name.partition("_")[0]: result for name, result in results.items()}
        title = "all milestones, all requests at once"
        console.print(comparison(title, short, FIGURES, costs))
    say(console, f"\n{SEEN}")


def runs_on_gpu(engine: LLMEngine) -> bool:
    """Return whether the forwards have a device of their own."""
    return engine.loaded.model.device.type == "cuda"
