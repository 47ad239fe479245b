"""What all demos share: arguments, opening an engine, recording its run, and example questions."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.logging import RichHandler

from ..clock import StepCosts
from ..config import EMBEDDED_MODEL, EngineConfig
from ..hf.gguf_folders import EmbeddedModelMissingError
from ..interrupts import is_interrupt
from ..llm_engine import LLMEngine
from ..tracing.chrome import chrome_trace
from ..tracing.forced_retractions import add_options, apply_options
from ..tracing.player import player_html
from ..tracing.trace import Trace
from ..virtual_time import use_virtual_time
from .film import film_strip
from .measured_costs import measure_costs
from .neighbour import neighbour
from .palette import use_palette

CHATS = [
    "Why is the sky blue?",
    "What is the capital of France?",
    "Explain what a cache is to a child.",
    "Give me three tips for better sleep.",
    "Write one sentence about the sea.",
    "What does a compiler do?",
    "Name a fruit that is red.",
    "How do birds find their way?",
    "What is 12 times 3?",
    "Tell me a short story about a robot.",
    "Why do we have seasons?",
    "What is the difference between a list and a tuple in Python?",
    "How is paper made?",
    "Suggest a name for a cat.",
    "What is a good breakfast?",
    "Describe the moon in one sentence.",
]
ROOT = Path(__file__).resolve().parents[2]
Engine = TypeVar("Engine", bound=LLMEngine)


def parser(description: str, *, requests: int, max_tokens: int) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all demos take."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument(
        "--model", default=EMBEDDED_MODEL, help="embedded name, HF id, path, tiny-*"
    )
    result.add_argument("--device", default="auto", help="auto, cpu or cuda")
    result.add_argument("--requests", type=_positive, default=requests, help="number of chats")
    result.add_argument(
        "--max-tokens", type=_positive, default=max_tokens, help="output tokens of each"
    )
    result.add_argument("--check", action="store_true", help="check invariants after every step")
    result.add_argument("--plain", action="store_true", help="lines instead of a live screen")
    result.add_argument(
        "--readable",
        action="store_true",
        help="run every line of the milestone in Python, for breakpoints and prints (and --plain)",
    )
    result.add_argument(
        "--measure-clock", action="store_true", help="virtual time is as fast as this machine"
    )
    add_options(result)
    result.add_argument(
        "--trace", type=_writable, metavar="FILE", help="write a trace for ui.perfetto.dev"
    )
    result.add_argument(
        "--player", type=_writable, metavar="FILE", help="write an HTML page that plays the run"
    )
    return result


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `EngineConfig` that the arguments of every demo set."""
    return {"model": args.model, "device": args.device, "readable": args.readable}


def make_console(args: argparse.Namespace) -> Console:
    """Return a console for the demo, and log to it. With `--plain` it never writes control codes.

    `--readable` implies it: a live screen and the prompt of a debugger would overwrite each other.
    """
    is_plain = args.plain or args.readable
    console = Console(force_terminal=False, no_color=True) if is_plain else Console()
    use_palette(console)
    handler: logging.Handler = logging.StreamHandler(sys.stdout)
    if not is_plain:
        handler = RichHandler(console=console, show_time=False, show_path=False)
    logging.basicConfig(level=args.log_level.upper(), format="%(message)s", handlers=[handler])
    return console


def open_engine(
    build: Callable[[EngineConfig], Engine], config: EngineConfig, console: Console
) -> Engine:
    """Build an engine and print what runs: milestone, model and machine.

    If the embedded model is not installed, the demo says so and uses a tiny random model. If the
    engine cannot be built, the demo ends with one line that says why.
    """
    try:
        engine = _build(build, config, console)
    except (ValueError, RuntimeError) as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        raise SystemExit(str(error)) from None
    milestone = type(engine).__module__.split(".")[-2]
    console.print(f"[bold]{milestone}[/] · {engine.loaded.name} · {machine()}", highlight=False)
    if line := neighbour():
        say(console, line)
    return engine


def _build(
    build: Callable[[EngineConfig], Engine], config: EngineConfig, console: Console
) -> Engine:
    try:
        with console.status(f"loading {config.model} …"):
            return build(config)
    except EmbeddedModelMissingError as missing:
        console.print(f"{missing}\nThe demo uses a tiny random model instead: its text is noise.")
        return build(EngineConfig(**{**vars(config), "model": "tiny-llama", "max_model_len": None}))


def in_virtual_time(engine: LLMEngine, args: argparse.Namespace, console: Console) -> StepCosts:
    """Let the engine run in virtual time, and print what a step takes in it."""
    costs, origin = StepCosts(), "the same on every machine"
    if args.measure_clock:
        with console.status("measuring the steps of this machine …"):
            costs, origin = measure_costs(engine), "measured on this machine"
    clock = use_virtual_time(engine, costs)
    say(console, f"Virtual time, {origin}: {clock.words}.")
    return costs


@contextmanager
def recorded(engine: LLMEngine, args: argparse.Namespace, console: Console) -> Iterator[Trace]:
    """Record what the engine does inside the context, and show it as a film strip at the end.

    `--trace` and `--player` name the files. They are also written when the run fails or is
    interrupted: such a run is worth reading.
    """
    try:
        apply_options(args, engine)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    trace = Trace(engine)
    trace.data.meta["machine"] = machine()
    try:
        with trace:
            yield trace
        console.print(film_strip(trace.data, console))
    finally:
        if args.trace is not None:
            args.trace.write_text(json.dumps(chrome_trace(trace.data)), encoding="utf-8")
            _say_path(console, f"trace:  {args.trace}, for ui.perfetto.dev or chrome://tracing")
        if args.player is not None:
            args.player.write_text(player_html(trace.data), encoding="utf-8")
            _say_path(console, f"player: {args.player}, for a browser")


def chats(count: int) -> list[str]:
    """Return `count` questions. They repeat after sixteen."""
    return [CHATS[i % len(CHATS)] for i in range(count)]


def machine() -> str:
    """Return a description of the machine. Only numbers of one machine can be compared."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    # Many kinds of CPU share one name. The width of their registers tells most of them apart.
    kind = f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{kind}, {os.cpu_count()} cores, torch {torch.__version__}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def say(console: Console, *sentences: str) -> None:
    """Print a paragraph."""
    console.print(" ".join(sentences), highlight=False, markup=False)


def look(console: Console, sentence: str) -> None:
    """Print what to look at on the live screen. Without one, its panels are not shown."""
    if console.is_terminal:
        say(console, sentence)


def goes_on(console: Console, seen: str, milestone: str) -> None:
    """Print what was seen, and the command of the demo after that of `milestone`, if it is there.

    A student's tree may not have it.
    """
    say(console, f"\n{seen}")
    number = int(milestone[1:].partition("_")[0])
    for demo in ROOT.glob(f"m{number + 1}_*/demo"):
        say(console, f"Next: python -m {demo.parent.name}.demo")


def _say_path(console: Console, line: str) -> None:
    """Print a line that a terminal, and not this program, may break: a path can be copied."""
    console.print(line, soft_wrap=True, highlight=False, markup=False)


def _writable(text: str) -> Path:
    """Return the path if a file can be written there. It is tried before the run, not after it."""
    path = Path(text)
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from None
    if not existed:
        path.unlink()
    return path


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
