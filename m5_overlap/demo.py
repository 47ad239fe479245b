"""Steps that overlap, live, and against the serial loop: `python -m m5_overlap.demo`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from common import EngineConfig
from common.dashboard import summary_table
from common.demo import machine, make_console, open_engine, parser, recorded
from common.trace import Trace
from common.workload import Workload, WorkloadResult, percentile, run, run_rung

from . import LLMEngine
from .lanes import NUM_LINES, Lanes
from .panels import Panels
from .serving import Serving

PAGE_SIZE = 8  # tokens
MAX_NUM_SEQS = 6
NUM_PAGES = 256
RUNGS = ("m1_single", "m2_continuous", "m3_paged", "m4_radix", "m5_overlap")


def arguments() -> Namespace:
    """What the command line asks for."""
    result = parser("Steps that overlap.", requests=12, max_tokens=24)
    result.add_argument(
        "--emulate", type=_milliseconds, default=0.0, metavar="MS",
        help="let each forward on a CPU take at least so long, asleep, as if a GPU computed it",
    )  # fmt: skip
    result.add_argument("--ladder", action="store_true", help="compare all rungs")
    return result.parse_args()


def main() -> None:
    """Serve conversations live; then the same requests serially and overlapped, and compare."""
    args = arguments()
    console = make_console(args)
    config: dict[str, Any] = {
        "model": args.model, "device": args.device, "emulated_forward_ms": args.emulate,
        "max_num_seqs": MAX_NUM_SEQS, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES,
    }  # fmt: skip
    with open_engine(LLMEngine, EngineConfig(**config), console) as engine:
        console.print(f"[bold]m5_overlap[/] · {engine.loaded.name} · {machine()}", highlight=False)
        serving = Serving(engine, console, args)
        panels = Panels(engine, console)
        with recorded(engine, args, console) as trace:
            lanes = Lanes(trace.record, console)
            serving.run(lambda: [lanes.panel(), *panels()], panels.num_lines + NUM_LINES)
        config["model"] = engine.loaded.name
        config["max_model_len"] = engine.config.max_model_len
        outputs = [args.max_tokens] * len(serving.prompts)
        workload = Workload(serving.prompts, outputs, config=config)
        compare_loops(workload, engine, console)
    if args.ladder:
        compare_rungs(workload, console)


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
    table = verdict("\nall requests at once, by the serial and the overlapped loop", results)
    table.add_row("mean gap between forwards", *gaps)
    if workload.config["emulated_forward_ms"]:
        table.caption = (
            f"emulated forwards: at least {workload.config['emulated_forward_ms']:g} ms each"
        )
    console.print(table)


def compare_rungs(workload: Workload, console: Console) -> None:
    """The whole ladder, each rung in a process of its own; nothing is emulated."""
    real = Workload(
        workload.prompts,
        workload.max_tokens,
        config={**workload.config, "emulated_forward_ms": 0.0},
    )
    results = {}
    for rung in RUNGS:
        with console.status(f"the same requests on {rung} …"):
            if (result := run_rung(rung, real)) is not None:
                results[rung.split("_")[0]] = result
    console.print(verdict("\nthe ladder, all requests at once", results))


def verdict(title: str, results: dict[str, WorkloadResult]) -> Table:
    """Runs of the same requests, side by side."""
    table = summary_table(title, "", *results)
    first = next(iter(results.values()))
    rows: dict[str, Callable[[WorkloadResult], str]] = {
        "tokens/s": lambda r: f"{r.tokens_per_second:.1f}",
        "ratio": lambda r: f"{r.tokens_per_second / first.tokens_per_second:.2f} x",
        "TTFT p50": lambda r: _ms(percentile(r.first_token_seconds, 50)),
        "TTFT p95": lambda r: _ms(percentile(r.first_token_seconds, 95)),
        "ITL p50": lambda r: _ms(percentile(r.inter_token_seconds, 50)),
        "ITL p95": lambda r: _ms(percentile(r.inter_token_seconds, 95)),
        "cache hit rate": lambda r: f"{hit_rate(r):.0%}",
        "steps": lambda r: str(r.stats["num_steps"]),
    }
    for name, figure in rows.items():
        table.add_row(name, *(figure(result) for result in results.values()))
    return table


def hit_rate(result: WorkloadResult) -> float:
    """The share of the prompt tokens that need not be computed."""
    reused = result.stats["cached_prompt_tokens"]
    return reused / max(1, reused + result.stats["prefill_tokens"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _milliseconds(text: str) -> float:
    value = float(text)
    EngineConfig(emulated_forward_ms=value)  # refuses what is none
    return value


if __name__ == "__main__":
    main()
