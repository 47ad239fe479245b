"""The serial loop beside the overlapped loop: on this machine, and on an emulated device."""

from __future__ import annotations

import os
from statistics import mean

from rich.console import Console

from common import LoadedModel
from common.displays.comparison import Figure, comparison, counter
from common.displays.workload import Workload, WorkloadResult, percentile

from .lanes import Lanes
from .loops import Loop, run_loop
from .replay import Recording, replay_loop

LOOPS = {"serial": False, "overlapped": True}  # `EngineConfig.enable_overlap`
ON_GPU = "The GPU computes the forwards while the host works."
ON_CPU = (
    f"The host and the forwards share the {os.cpu_count()} cores of this CPU. The time that "
    "overlapping saves is taken from the forwards: expect a ratio near 1."
)
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "forward, mean": lambda r: f"{1e3 * mean(r.forward_seconds):.2f} ms",
    "gap between forwards, mean": lambda r: f"{mean_gap_ms(r):.2f} ms",
    "ITL p50": lambda r: f"{1e3 * percentile(r.inter_token_seconds, 50):.2f} ms",
}


def compare_real(
    workload: Workload, loaded: LoadedModel, on_gpu: bool, console: Console
) -> dict[str, Loop]:
    """Run and show both loops on this machine as it is."""
    headline(console, "Real: this GPU" if on_gpu else "Real: this CPU as it is")
    say(
        console,
        f"Both loops serve the {len(workload.prompts)} requests of the live run again, now all "
        "at once. Nothing is emulated.",
        ON_GPU if on_gpu else ON_CPU,
    )
    loops = {}
    for name, overlap in LOOPS.items():
        with console.status(f"the same requests, {name} …"):
            loops[name] = run_loop(workload, overlap, loaded)
    show(loops, "real", "real: all requests at once", console)
    return loops


def compare_emulated(
    workload: Workload, loaded: LoadedModel, real: Loop, milliseconds: float, console: Console
) -> None:
    """Run and show both loops on an emulated device, which shares no core with the host.

    real: the run to replay. milliseconds: of each forward; 0: the mean of `real`.
    """
    recording = Recording(workload, real.result)
    forward_ms = milliseconds or round(1e3 * mean(real.result.forward_seconds), 2)
    how = "--emulate sets this time" if milliseconds else "the mean of the serial loop above"
    headline(console, "Emulated: the same requests on a device beside this CPU")
    say(
        console,
        "Real: all work of the host. Emulated: the device.",
        f"A forward computes nothing. It sleeps until {forward_ms:g} ms are over ({how}), and "
        "returns the tokens that the serial loop gave above. Sleeping uses no core: the host has "
        "the whole CPU, as it would beside a GPU.",
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
        f"On the emulated device, the mean gap between forwards is {mean_gap_ms(serial):.2f} ms in "
        f"the serial loop and {mean_gap_ms(overlapped):.2f} ms in the overlapped loop. The "
        f"overlapped loop serves {ratio:.2f} times as many tokens per second.",
        f"Both replays returned exactly the {sum(map(len, serial.token_ids))} recorded tokens.",
    )


def show(loops: dict[str, Loop], kind: str, title: str, console: Console) -> None:
    """Print the lanes of each loop, and a table of what was measured.

    kind: `real` or `emulated`; it labels each lane and each column.
    """
    for name, loop in loops.items():
        console.print(Lanes(loop.trace, console).panel(f"{name}, {kind}"))
    results = {f"{name}, {kind}": loop.result for name, loop in loops.items()}
    console.print(comparison(title, results, FIGURES))


def mean_gap_ms(result: WorkloadResult) -> float:
    """Return the mean milliseconds from the end of a forward to the start of the next one."""
    return 1e3 * mean(result.gap_seconds) if result.gap_seconds else 0.0


def headline(console: Console, text: str) -> None:
    """Print the title of a part."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def say(console: Console, *sentences: str) -> None:
    """Print a paragraph."""
    console.print(" ".join(sentences), highlight=False, markup=False)
