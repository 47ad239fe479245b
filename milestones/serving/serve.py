"""`serve m5`: a milestone as a server with OpenAI's HTTP interface.

All fields of `EngineConfig` and `ServerSettings` are options. SERVING.md follows a request through
the server. With `--replicas`, several engines answer behind a router (SCALING.md). Exit status: 2
for wrong settings or missing packages.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rich.console import Console

from common import EngineConfig, LLMEngine
from common.interrupts import is_interrupt
from common.tracing import forced_retractions

from ..chain import ROOT, engines, find_engine, load
from ..console import wide_console
from ..extras import missing
from .scale.settings import ScaleSettings
from .server.settings import ServerSettings

EXAMPLE = "python -m milestones serve m5 --port 8000 --max-num-seqs 32"
FIELD = re.compile(r"^    (\w+): (.+?)(?=^    \w+: |^    \Z|^\s*$|\Z)", re.MULTILINE | re.DOTALL)
Config = TypeVar("Config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m milestones serve`."""
    parser.add_argument("milestone", help=f"one of {', '.join(engines(ROOT))}, or m5 for short")
    forced_retractions.add_options(parser)
    add_options(parser, EngineConfig)
    add_options(parser, ServerSettings)
    add_options(parser, ScaleSettings)


def main(args: argparse.Namespace) -> int:
    """Load the engine, and serve it until a signal arrives."""
    console = wide_console()
    logging.basicConfig(level=args.log_level.upper())
    extras = ("serve", "scale") if args.replicas else ("serve",)
    if lines := [line for extra in extras if (line := missing(extra))]:
        console.print(lines[0], style="red")
        return 2
    try:
        milestone = find_engine(args.milestone)
        settings, scale = from_options(ServerSettings, args), from_options(ScaleSettings, args)
        if scale.replicas:
            from .scale.serve import run_replicas  # it needs the extra

            if args.retract_every is not None:
                raise ValueError("--retract-every needs one engine, and --replicas makes several")
            return run_replicas(milestone, from_options(EngineConfig, args), settings, scale)
        build: Callable[[EngineConfig], LLMEngine]
        build = load(milestone).LLMEngine
        engine = build(from_options(EngineConfig, args))
        forced_retractions.apply_options(args, engine)
    except (ValueError, RuntimeError) as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        console.print(str(error), style="red")
        return 2
    return run(milestone, engine, settings, console)


def run(milestone: str, engine: LLMEngine, settings: ServerSettings, console: Console) -> int:
    """Serve until a signal arrives. Print the URL when the server accepts connections."""
    from .server.run import Server  # it needs the extra

    def ready(address: str) -> None:
        model = settings.served_model_name or engine.loaded.name
        console.print(f"{milestone} serves {model} at {address}/v1 (Ctrl-C drains and stops)")
        if settings.live_page:
            console.print(f"chats, and the engine step by step: {address}/")
        sys.stdout.flush()

    try:
        server = Server(engine, settings, ready)
    except ValueError as error:  # adapters that cannot be loaded
        engine.close()
        console.print(str(error), style="red")
        return 2
    return server.serve_until_signal()


def add_options(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add an option for each field of a dataclass: `--max-num-seqs` for `max_num_seqs`.

    The help of an option is the paragraph `name: text` of the docstring.
    """
    group = parser.add_argument_group(config_class.__name__)
    hints, help_of = get_type_hints(config_class), described(config_class)
    for field in fields(config_class):
        text = f"{help_of[field.name]} (default: {field.default})".replace("%", "%%")
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, default=field.default, help=text, **_reading(hints[field.name]))


def from_options(config_class: type[Config], args: argparse.Namespace) -> Config:
    """Return a dataclass with the values of the options. Raises `ValueError` as it does."""
    values = {field.name: getattr(args, field.name) for field in fields(config_class)}  # type: ignore[arg-type]
    return config_class(**values)


def described(config_class: type) -> dict[str, str]:
    """Return the text about each field in the docstring of a dataclass."""
    found = FIELD.findall(config_class.__doc__ or "")
    return {name: " ".join(text.split()).replace("`", "") for name, text in found}


def _reading(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that read a value of this type."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    (kind,) = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    return {"type": kind, "metavar": kind.__name__.upper()}
