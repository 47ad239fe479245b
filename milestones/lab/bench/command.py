"""Measure every milestone and other engines on the same workloads, in one run.

Each measurement runs in its own process. The engines take turns in each round, so a machine that
slows down slows all of them. The tables show the median of the rounds. Compare only ratios of one
run: absolute numbers depend on the machine.

    python -m milestones bench --workload batch --workload shared --rounds 3 --json bench.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import EMBEDDED_MODEL, EngineConfig, load_model
from common.displays.demo import machine

from ... import recording
from ...chain import electives
from ...console import wide_console
from ...drawing.chart import bars
from . import report, roofline
from .engines import BenchEngine, all_engines, of_tree
from .neighbours import neighbours
from .workloads import WORKLOADS, workload

DEFAULT_WORKLOADS = ("alone", "batch")
FAILURES = (OSError, RuntimeError, ValueError)  # of one engine: the others are still measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m milestones bench`."""
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="default: %(default)s")
    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, "all"],
        help=f"can be given several times (default: {' and '.join(DEFAULT_WORKLOADS)})",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--quantization", choices=["auto", "none"], default="auto",
        help="of the milestones: none computes with the weights in float32 (default: as stored)",
    )  # fmt: skip
    parser.add_argument(
        "--engines", help="measure only these engines, such as m5_overlap,speculative"
    )
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH",
        help="also measure vLLM: the Python of an environment that has vLLM",
    )  # fmt: skip
    parser.add_argument(
        "--llama-python", type=Path, metavar="PATH",
        help="also measure llama.cpp: the Python of an environment that has xllamacpp and gguf",
    )  # fmt: skip
    parser.add_argument(
        "--openvino-python", type=Path, metavar="PATH",
        help="also measure OpenVINO GenAI: the Python of an environment that has openvino-genai",
    )  # fmt: skip
    parser.add_argument(
        "--onnx-python", type=Path, metavar="PATH",
        help="also measure ONNX Runtime GenAI: the Python of an environment that has "
        "onnxruntime-genai, and torch, transformers, onnx and onnx-ir for its converter",
    )  # fmt: skip
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N",
        help="let N endless loops run beside the engines (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=Path,
        help="write all measurements to this file; its entries for other workloads are kept",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, help="draw tokens/s as bars into this file")
    parser.add_argument(
        "--readme", action="store_true", help="write the results into the README and SPEED.md"
    )


def main(args: argparse.Namespace) -> int:
    """Measure and report. After Ctrl-C, report what was measured. Leave out failed engines."""
    console = wide_console()
    wanted = args.workload or list(DEFAULT_WORKLOADS)
    names = list(WORKLOADS) if "all" in wanted else list(dict.fromkeys(wanted))
    measured = all_engines(
        args.model, vllm=args.vllm_python, llama=args.llama_python,
        openvino=args.openvino_python, onnx=args.onnx_python,
    )  # fmt: skip
    if args.engines:
        known = {engine.name: engine for engine in (*measured, *map(of_tree, electives()))}
        chosen = args.engines.split(",")
        if unknown := [name for name in chosen if name not in known]:
            console.print(f"unknown engine: {', '.join(unknown)}; there are {', '.join(known)}")
            return 2
        measured = [known[name] for name in chosen]
    loaded = load_model(EngineConfig(model=args.model, quantization=args.quantization))
    floor, on_gpu = roofline.measure(loaded.model), loaded.model.device.type == "cuda"
    vocab_size = loaded.vocab_size
    settings = {"quantization": args.quantization, "beside": args.beside}
    earlier = report.earlier(args.json, settings)
    failed: list[BenchEngine] = []
    del loaded
    works = {
        name: workload(name, args.model, vocab_size, on_gpu, args.quantization) for name in names
    }

    def document() -> dict[str, Any]:
        return report.document(measured, floor, earlier, works, settings)

    try:
        for number in range(1, args.rounds + 1):
            for name in names:
                for engine in (engine for engine in measured if engine not in failed):
                    console.print(
                        f"round {number} of {args.rounds}: {name}, {engine.name}", style="dim"
                    )
                    try:
                        with neighbours(args.beside):
                            result = engine.run(works[name])
                    except FAILURES as error:
                        console.print(f"{engine.name} failed; the bench leaves it out: {error}")
                        failed.append(engine)
                        continue
                    engine.results.setdefault(name, []).append(result)
                    if args.json:
                        recording.write(args.json, document())
    except KeyboardInterrupt:
        console.print("interrupted: the tables show what was measured so far")
    finally:
        for engine in measured:
            engine.close()
    names = [name for name in names if any(name in engine.results for engine in measured)]
    console.print(
        f"{machine()}: reads {floor.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{floor.flops_per_second / 1e9:.0f} GFLOP/s; a decode step takes at least "
        f"{floor.step_seconds(1) * 1e3:.1f} ms for one request, "
        f"{floor.step_seconds(16) * 1e3:.1f} ms for 16"
    )
    for name in names:
        console.print(report.table(name, measured, floor, works[name].sampling))
    if args.svg:
        args.svg.write_text(bars(document()), encoding="utf-8")
    if args.readme:
        report.refresh_pages(document())
    return 0 if names and not failed else 1
