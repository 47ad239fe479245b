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
from common.displays.demo import engine_options, make_console, open_engine, parser, recorded
from common.displays.serving import serve
from common.displays.workload import percentile

from .. import LLMEngine
from .agents import conversations
from .both_loops import compare_emulated, compare_real
from .lanes import LivePanels

EMULATED_MS = 3.0  # a decode step of a small model on a GPU
MILESTONES = ("m1_single", "m2_continuous", "m3_paged", "m4_radix", "m5_overlap")
FIGURES: dict[str, Figure] = {  # of the milestones
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
    "TTFT p50": lambda r: seconds(percentile(r.first_token_seconds, 50)),
    "ITL p95": lambda r: seconds(percentile(r.inter_token_seconds, 95)),
}


def arguments() -> Namespace:
    """Return what the command line asks for."""
    result = parser("Steps that overlap.", requests=12, max_tokens=24)
    result.add_argument(
        "--emulate", type=_milliseconds, metavar="MS",
        help="on a CPU: the time of a forward on the emulated device; 0: the time measured here "
        f"(default: {EMULATED_MS:g}, as short as a GPU's)",
    )  # fmt: skip
    result.add_argument("--ladder", action="store_true", help="compare all milestones")
    return result.parse_args()


def main() -> None:
    """Serve conversations live; then the same requests by the serial and the overlapped loop."""
    args = arguments()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        on_gpu = runs_on_gpu(engine)
        if on_gpu and args.emulate is not None:
            raise SystemExit("--emulate is for CPUs: on a GPU, the demo measures real forwards")
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        workload = workload_of(engine, prompts, args)
        real = compare_real(workload, engine.loaded, on_gpu, console)
        if not on_gpu:
            emulated_ms = EMULATED_MS if args.emulate is None else args.emulate
            compare_emulated(workload, engine.loaded, real["serial"], emulated_ms, console)
    if args.ladder:
        results = run_milestones(dict.fromkeys(MILESTONES, workload), console)
        short = {name.partition("_")[0]: result for name, result in results.items()}
        console.print(comparison("all milestones, all requests at once", short, FIGURES))


def runs_on_gpu(engine: LLMEngine) -> bool:
    """Return whether the forwards have a device of their own, so that nothing is emulated."""
    return engine.loaded.model.device.type == "cuda"


def _milliseconds(text: str) -> float:
    value = float(text)
    EngineConfig(emulated_forward_ms=value)  # raises `ValueError` for a bad value
    return value
