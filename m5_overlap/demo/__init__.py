"""Steps that overlap, live, and against the serial loop: `python -m m5_overlap.demo`."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from common import EngineConfig
from common.comparison import Figure, comparison, counter, run_rungs, seconds, workload_of
from common.demo import make_console, open_engine, parser, recorded
from common.demo_serving import serve
from common.trace import Trace
from common.workload import Workload, WorkloadResult, percentile, run

from .. import LLMEngine
from .agents import conversations
from .lanes import Lanes, LivePanels

MILESTONES = ("m1_single", "m2_continuous", "m3_paged", "m4_radix", "m5_overlap")
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "TTFT p50": lambda r: seconds(percentile(r.first_token_seconds, 50)),
    "ITL p50": lambda r: seconds(percentile(r.inter_token_seconds, 50)),
    "ITL p95": lambda r: seconds(percentile(r.inter_token_seconds, 95)),
}


def arguments() -> Namespace:
    """Return what the command line asks for."""
    result = parser("Steps that overlap.", requests=12, max_tokens=24)
    result.add_argument(
        "--emulate", type=_milliseconds, default=0.0, metavar="MS",
        help="let each forward on a CPU take at least so long, asleep, as if a GPU computed it",
    )  # fmt: skip
    result.add_argument("--ladder", action="store_true", help="compare all milestones")
    return result.parse_args()


def main() -> None:
    """Serve conversations live; then the same requests serially and overlapped, and compare."""
    args = arguments()
    console = make_console(args)
    config = EngineConfig(
        model=args.model, device=args.device, emulated_forward_ms=args.emulate,
        max_num_seqs=6, page_size=8, num_pages=256,
    )  # fmt: skip
    with open_engine(LLMEngine, config, console) as engine:
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.record, console)
            prompts = serve(engine, arrivals, panels, args, console)
        workload = workload_of(engine, prompts, args)
        compare_loops(workload, engine, console)
    if args.ladder:
        compare_milestones(workload, console)


def compare_loops(workload: Workload, engine: LLMEngine, console: Console) -> None:
    """The same requests, all there at once, by both loops."""
    results: dict[str, WorkloadResult] = {}
    gaps: list[str] = []
    for name, overlap in (("serial", False), ("overlapped", True)):
        config = EngineConfig(**{**workload.config, "enable_overlap": overlap})
        with console.status(f"the same requests, {name} …"):
            with LLMEngine(config, engine.loaded) as fresh:
                run(fresh, workload.warm_up())
                with Trace(fresh) as trace:
                    results[name] = run(fresh, workload)
            lanes = Lanes(trace.record, console)
        console.print(lanes.panel(f"{name} ·"))
        gaps.append(f"{1e3 * lanes.mean_gap:.2f} ms")
    table = comparison(
        "all requests at once, by the serial and the overlapped loop", results, FIGURES
    )
    table.add_row("mean gap between forwards", *gaps)
    if workload.config["emulated_forward_ms"]:
        table.caption = (
            f"emulated forwards: at least {workload.config['emulated_forward_ms']:g} ms each"
        )
    console.print(table)


def compare_milestones(workload: Workload, console: Console) -> None:
    """Compare all milestones on the same requests. Nothing is emulated."""
    real = Workload(
        workload.prompts,
        workload.max_tokens,
        config={**workload.config, "emulated_forward_ms": 0.0},
    )
    results = run_rungs(dict.fromkeys(MILESTONES, real), console)
    short = {name.partition("_")[0]: result for name, result in results.items()}
    console.print(comparison("all milestones, all requests at once", short, FIGURES))


def _milliseconds(text: str) -> float:
    value = float(text)
    EngineConfig(emulated_forward_ms=value)  # raises `ValueError` for a bad value
    return value
