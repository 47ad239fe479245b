"""`load URL`: send requests at random times to a server, at several rates, and show the latencies.

The server can be `python -m milestones serve` or any other with `/v1/completions`, `/v1/models` and
`/tokenize`, such as vLLM's. With `--engines`, the command serves several engines in turn, and sends
the same requests to each. Exit status: 1 if no request was answered; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from common.displays.demo import machine

from ... import recording
from ...chain import ROOT
from ...console import wide_console
from ...drawing import chart
from ...extras import missing
from .arrivals import TEXT, Workload, length_range

if TYPE_CHECKING:
    from .report import Row

URL = re.compile(r"serves .* at (http://\S+/v1)")
SECONDS = 30.0  # for an orderly end; after that the process is killed
EXAMPLE = "python -m milestones load http://127.0.0.1:8000/v1 --rates 1,2,4,8 --duration 60"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones load`."""
    parser.add_argument("url", nargs="?", help="the API, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--engines", type=lambda text: text.split(","), metavar="M,M,...",
                        help="instead of a URL: serve these engines in turn")  # fmt: skip
    parser.add_argument("--serve-options", type=shlex.split, default=[], metavar="'...'",
                        help="options of `serve` for --engines")  # fmt: skip
    parser.add_argument("--rates", type=_rates, default=[1.0, 2.0, 4.0, 8.0], metavar="R,R,...",
                        help="requests per second, one run for each (1,2,4,8)")  # fmt: skip
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of a run (60)")
    parser.add_argument("--warm-up", type=float, default=5.0,
                        help="seconds before, which are not counted (5)")  # fmt: skip
    parser.add_argument("--prompt-tokens", type=length_range, default=(64, 256), metavar="N-M",
                        help="uniform distribution of prompt lengths (64-256)")  # fmt: skip
    parser.add_argument("--output-tokens", type=length_range, default=(32, 128), metavar="N-M",
                        help="uniform distribution of output lengths (32-128)")  # fmt: skip
    parser.add_argument("--prefixes", type=int, default=0, metavar="K",
                        help="each prompt begins with one of K shared prefixes (0)")  # fmt: skip
    parser.add_argument("--prefix-tokens", type=int, default=256, help="length of a prefix (256)")
    parser.add_argument("--ttft", type=float, default=1.0, metavar="S",
                        help="limit of goodput: seconds to the first token (1)")  # fmt: skip
    parser.add_argument("--itl", type=float, default=0.1, metavar="S",
                        help="limit of goodput: mean seconds per further token (0.1)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of lengths and times (0)")
    parser.add_argument("--api-key", help="sent as Authorization: Bearer ...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves into this file")


def main(args: argparse.Namespace) -> int:
    """Run all rates against one server, or against each engine in turn, and print the tables."""
    console = wide_console()
    if line := missing("serve"):
        console.print(line, style="red")
        return 2
    if (args.url is None) == (args.engines is None):
        console.print("name either a URL or --engines", style="red")
        return 2
    import httpx2

    runs: dict[str, list[Row]] = {}
    model = ""
    for name in args.engines or [args.url]:
        try:
            where = served(name, args.serve_options) if args.engines else nullcontext(args.url)
            with where as url:
                model, runs[name] = asyncio.run(_run(args, url))
        except (httpx2.HTTPError, RuntimeError) as error:
            console.print(f"{name}: {error}", style="red")
            return 1
        _report(args, console, f"{model} at {name}", runs[name])
        _write(args, model, runs)  # if a later engine fails, this is not lost
    everything = itertools.chain.from_iterable(runs.values())
    return 0 if any(row.num_failed < row.num_requests for row in everything) else 1


def _write(args: argparse.Namespace, model: str, runs: dict[str, list[Row]]) -> None:
    figures = {name: [asdict(row) for row in rows] for name, rows in runs.items()}
    found = {"engines": figures} if args.engines else {"rows": figures[args.url]}
    document = {"machine": machine(), "model": model, **found}
    if args.json:
        recording.write(args.json, document)
    if args.svg:
        as_in_the_file = json.loads(json.dumps(document))
        args.svg.write_text(chart.load(as_in_the_file), encoding="utf-8")


def _report(args: argparse.Namespace, console: Console, title: str, rows: Sequence[Row]) -> None:
    from .report import table

    limits = f"TTFT <= {args.ttft:g} s, {args.itl:g} s per token"
    console.print(table(rows, f"{title}: {limits}"))
    for row in rows:
        for message, count in row.errors.items():
            console.print(f"{row.rate:g} requests/s: {count} failed: {message}")


async def _run(args: argparse.Namespace, url: str) -> tuple[str, list[Row]]:
    """Return the model of a server, and the figures of each rate.

    With `--engines`, an engine gets no higher rate after one at which less than half of the
    answers kept the limits: its queue would only grow for a longer time.
    """
    from .client import Target
    from .report import Limits, summary

    rows: list[Row] = []
    target = Target(url, args.api_key)
    async with target.client:
        model = await target.model()
        token_ids = await target.tokenize(model, TEXT)
        workload = Workload(
            args.prompt_tokens, args.output_tokens, token_ids, args.prefixes, args.prefix_tokens
        )
        for rate in args.rates:
            seconds = args.warm_up + args.duration
            arrivals = list(workload.arrivals(rate, seconds, args.seed))
            answers = await target.run(model, arrivals)
            limits = Limits(args.ttft, args.itl)
            rows.append(summary(rate, args.duration, answers, args.warm_up, limits))
            if args.engines and rows[-1].goodput < rows[-1].num_requests / args.duration / 2:
                break
    return model, rows


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates are positive numbers: 1,2,4; got {text!r}")
    return rates


@contextmanager
def served(engine: str, options: Sequence[str]) -> Iterator[str]:
    """Serve an engine on a free port of 127.0.0.1, and yield the URL of its API.

    options: of `python -m milestones serve`. Raises `RuntimeError` with the server's message if it
    does not start.
    """
    command = [sys.executable, "-m", "milestones", "serve", engine, "--port", "0", *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield _url(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=SECONDS)  # it also reads what the server still prints
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if found := URL.search(line):
            return found[1]
        said.append(line)
    raise RuntimeError("the server did not start:\n" + "".join(said).rstrip())
