"""Steps that overlap, live, and against the serial loop: `python -m m5_overlap.demo`."""

from __future__ import annotations

import os
from argparse import Namespace
from statistics import mean

from rich.console import Console

from common import EngineConfig, LoadedModel
from common.comparison import Figure, comparison, counter, run_milestones, seconds, workload_of
from common.demo import make_console, open_engine, parser, recorded
from common.demo_serving import serve
from common.workload import Workload, percentile

from .. import LLMEngine
from .agents import conversations
from .lanes import LivePanels
from .loops import LOOPS, Loop, mean_gap, run_loop, show
from .replay import Recording, replay_loop

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
        "--emulate", type=_milliseconds, default=0.0, metavar="MS",
        help="on a CPU: the time of a forward on the emulated device; 0: the time measured here",
    )  # fmt: skip
    result.add_argument("--ladder", action="store_true", help="compare all milestones")
    return result.parse_args()


def main() -> None:
    """Serve conversations live; then the same requests by the serial and the overlapped loop."""
    args = arguments()
    console = make_console(args)
    config = EngineConfig(
        model=args.model, device=args.device, max_num_seqs=6, page_size=8, num_pages=256
    )
    with open_engine(LLMEngine, config, console) as engine:
        on_gpu = runs_on_gpu(engine)
        if on_gpu and args.emulate:
            raise SystemExit("--emulate is for CPUs: on a GPU, the demo measures real forwards")
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.record, console)
            prompts = serve(engine, arrivals, panels, args, console)
        workload = workload_of(engine, prompts, args)
        real = compare_real(workload, engine.loaded, on_gpu, console)
        if not on_gpu:
            compare_emulated(workload, engine.loaded, real["serial"], args.emulate, console)
    if args.ladder:
        results = run_milestones(dict.fromkeys(MILESTONES, workload), console)
        short = {name.partition("_")[0]: result for name, result in results.items()}
        console.print(comparison("all milestones, all requests at once", short, FIGURES))


def runs_on_gpu(engine: LLMEngine) -> bool:
    """Return whether the forwards have a device of their own, so that nothing is emulated."""
    return engine.loaded.model.device.type == "cuda"


def compare_real(
    workload: Workload, loaded: LoadedModel, on_gpu: bool, console: Console
) -> dict[str, Loop]:
    """Compare the two loops on this machine as it is."""
    headline(console, "Real: this GPU" if on_gpu else "Real: this CPU as it is")
    say(
        console,
        f"Both loops serve the {len(workload.prompts)} requests of the live run again, now all "
        "at once. Nothing is emulated.",
        "The GPU computes the forwards while the host works."
        if on_gpu
        else f"The host and the forwards share the {os.cpu_count()} cores of this CPU. What "
        "overlapping saves, it takes from the forwards: expect a ratio near 1.",
    )
    loops = {}
    for name, overlap in LOOPS.items():
        with console.status(f"the same requests, {name} …"):
            loops[name] = run_loop(workload, overlap, loaded)
    show(loops, "real", "real: all requests at once", console)
    return loops


def compare_emulated(
    workload: Workload,
    loaded: LoadedModel,
    real: Loop,
    milliseconds: float,
    console: Console,
) -> None:
    """Compare the two loops on an emulated device, which shares no core with the host.

    real: the run to replay. milliseconds: of each forward; 0: the mean of `real`.
    """
    recording = Recording(workload, real.result)
    forward_ms = milliseconds or round(1e3 * mean(real.result.forward_seconds), 2)
    reason = "--emulate" if milliseconds else "the mean of the serial loop above"
    headline(console, "Emulated: the same requests on a device beside this CPU")
    say(
        console,
        "Real: all work of the host. Emulated: the device.",
        f"A forward computes nothing. It sleeps until {forward_ms:g} ms are over ({reason}), and "
        "returns the tokens that the serial loop gave above. Sleeping uses no core: the host has "
        "the CPU to itself, as beside a GPU.",
    )
    loops = {}
    for name, overlap in LOOPS.items():
        with console.status(f"the same requests, {name}, emulated …"):
            loops[name] = replay_loop(workload, overlap, recording, forward_ms, loaded)
    title = f"emulated: all requests at once, each forward sleeps {forward_ms:g} ms"
    show(loops, "emulated", title, console)
    serial, overlapped = (loop.result for loop in loops.values())
    ratio = overlapped.tokens_per_second / serial.tokens_per_second
    say(
        console,
        f"On the emulated device, the mean gap between forwards is {1e3 * mean_gap(serial):.2f} ms "
        f"in the serial loop and {1e3 * mean_gap(overlapped):.2f} ms in the overlapped loop, which "
        f"serves {ratio:.2f} times as many tokens per second.",
        f"Both replays returned exactly the {sum(map(len, serial.token_ids))} recorded tokens.",
    )


def headline(console: Console, text: str) -> None:
    """Print the title of a part."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def say(console: Console, *sentences: str) -> None:
    """Print a paragraph."""
    console.print(" ".join(sentences), highlight=False, markup=False)


def _milliseconds(text: str) -> float:
    value = float(text)
    EngineConfig(emulated_forward_ms=value)  # raises `ValueError` for a bad value
    return value
