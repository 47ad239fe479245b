"""The ladder, measured: every rung and its peers on one workload, interleaved in one run.

Each measurement has a process of its own. Rounds are interleaved, so that a machine that slows down
slows all of them; the median of the rounds counts, and ratios of one run are what may be compared.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from common import EMBEDDED_MODEL, EngineConfig, load_model
from common.dashboard import summary_table
from common.demo import chats, machine
from common.input_processor import InputProcessor
from common.workload import Workload, WorkloadResult, run_module

from .delta import ROOT

README_MARKS = ("<!-- ladder -->", "<!-- /ladder -->")


@dataclass
class Contender:
    """A rung or a peer, and what was measured of it."""

    name: str
    command: tuple[str, ...]
    results: list[WorkloadResult] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return median(result.tokens_per_second for result in self.results)

    @property
    def first_token_seconds(self) -> float:
        """The median request's time to first token, in the median round."""
        return median(median(result.first_token_seconds) for result in self.results)

    @property
    def kv_waste(self) -> float | None:
        """The share of the KV memory held that nothing was written to."""
        return self.results[-1].kv_waste


def contenders() -> list[Contender]:
    """Every rung that exists, then the peers."""
    rungs = sorted(path.name for path in ROOT.iterdir() if re.fullmatch(r"m\d_\w+", path.name))
    return [
        *(Contender(rung, ("common.workload", rung)) for rung in rungs),
        Contender("hf-static", ("milestones.peers", "hf-static")),
    ]


def batch_workload(model: str, requests: int, max_tokens: int) -> Workload:
    """`requests` short chats at once, `max_tokens` tokens each."""
    loaded = load_model(EngineConfig(model=model))
    processor = InputProcessor(
        loaded, EngineConfig(model=model, max_model_len=512), lambda _: False
    )
    prompts = [
        processor.apply_chat_template([{"role": "user", "content": question}]).prompt_token_ids
        for question in chats(requests)
    ]
    config = {"model": model, "max_num_seqs": requests}
    return Workload(prompts, [max_tokens] * requests, ignore_eos=True, config=config)


def report(measured: list[Contender], requests: int, max_tokens: int) -> Table:
    """The table for a terminal."""
    table = summary_table(
        f"{requests} chats at once, {max_tokens} tokens each · {machine()}",
        "engine", "tokens/s", "ratio", "TTFT p50", "padding", "KV unused",
    )  # fmt: skip
    for contender in measured:
        waste = contender.kv_waste
        table.add_row(
            contender.name,
            f"{contender.tokens_per_second:.1f}",
            f"{contender.tokens_per_second / measured[0].tokens_per_second:.2f}",
            f"{contender.first_token_seconds:.2f} s",
            str(contender.results[-1].stats.get("padding_tokens", "")),
            "" if waste is None else f"{waste:.0%}",
        )
    return table


def refresh_readme(measured: list[Contender], requests: int, max_tokens: int) -> None:
    """Write the numbers between the README's marks."""
    lines = [
        f"{requests} chats at once, {max_tokens} tokens each, SmolLM2-135M, float32, {machine()}:",
        "",
        "| engine | tokens/s | against m1 | first token (median) | reserved KV unused |",
        "|---|---|---|---|---|",
    ]
    for contender in measured:
        ratio = contender.tokens_per_second / measured[0].tokens_per_second
        waste = "" if contender.kv_waste is None else f"{contender.kv_waste:.0%}"
        lines.append(
            f"| {contender.name} | {contender.tokens_per_second:.1f} | {ratio:.1f} x "
            f"| {contender.first_token_seconds:.2f} s | {waste} |"
        )
    readme = ROOT / "README.md"
    start, end = README_MARKS
    before, rest = readme.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    readme.write_text(f"{before}{start}\n{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m milestones bench`."""
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--readme", action="store_true", help="refresh the README's table")


def main(args: argparse.Namespace) -> int:
    """Measure and report. Cut short by Ctrl-C, it reports the rounds that are complete."""
    console = Console()
    workload = batch_workload(args.model, args.requests, args.max_tokens)
    measured = contenders()
    try:
        for number in range(1, args.rounds + 1):
            done: list[WorkloadResult] = []
            for contender in measured:
                console.print(f"round {number} of {args.rounds}: {contender.name}", style="dim")
                done.append(run_module(workload, *contender.command))
            for contender, result in zip(measured, done, strict=True):
                contender.results.append(result)
    except KeyboardInterrupt:
        console.print("cut short")
    if not measured[0].results:
        return 1
    console.print(report(measured, args.requests, args.max_tokens))
    if args.json:
        args.json.write_text(json.dumps(_as_json(measured), indent=1) + "\n", encoding="utf-8")
    if args.readme:
        refresh_readme(measured, args.requests, args.max_tokens)
    return 0


def _as_json(measured: list[Contender]) -> dict[str, object]:
    return {
        "machine": machine(),
        "engines": {
            contender.name: {
                "tokens_per_second": [result.tokens_per_second for result in contender.results],
                "seconds": [result.seconds for result in contender.results],
                "first_token_seconds": contender.first_token_seconds,
                "stats": contender.results[-1].stats,
            }
            for contender in measured
        },
    }
