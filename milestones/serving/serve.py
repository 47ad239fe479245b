"""`serve m5`: a milestone as a server with OpenAI's HTTP interface.

All fields of `EngineConfig` and `ServerSettings` are options. SERVING.md follows a request through
the server. `serve m3 m4` also shows a second engine on the live page. With `--replicas`, several
engines answer behind a router (SCALING.md). Exit status: 2 for wrong settings or missing packages.
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
    parser.add_argument(
        "milestones", metavar="milestone", nargs="+",
        help=f"one of {', '.join(engines(ROOT))}, or m5 for short. With two, the live page shows "
        "both engines side by side, and the API has the first one",
    )  # fmt: skip
    forced_retractions.add_options(parser)
    add_options(parser, EngineConfig)
    add_options(parser, ServerSettings)
    add_options(parser, ScaleSettings)


def main(args: argparse.Namespace) -> int:
    """Load the engine, and serve it until a signal arrives."""
    console = wide_console()
    logging.basicConfig(level=args.log_level.upper())
    extras = ("serve", "scale") if args.replicas or args.decode else ("serve",)
    if lines := [line for extra in extras if (line := missing(extra))]:
        console.print(lines[0], style="red")
        return 2
    try:
        names = [find_engine(name) for name in args.milestones]
        settings, scale = from_options(ServerSettings, args), from_options(ScaleSettings, args)
        check_names(names, settings, scale)
        if scale.num_replicas:
            from .scale.serve import run_replicas  # it needs the extra

            if args.retract_every is not None:
                raise ValueError(
                    "--retract-every needs an engine in this process: leave out --replicas and "
                    "--decode"
                )
            return run_replicas(names[0], from_options(EngineConfig, args), settings, scale)
        served = open_engines(names, from_options(EngineConfig, args))
        for engine in served.values():
            forced_retractions.apply_options(args, engine)
    except (ValueError, RuntimeError) as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        console.print(str(error), style="red")
        return 2
    return run(served, settings, console)


def check_names(names: list[str], settings: ServerSettings, scale: ScaleSettings) -> None:
    """Raise `ValueError` for engines that cannot be served together."""
    if scale.decode and names != ["disaggregated"]:
        raise ValueError(f"prefill and decode are for disaggregated, got {' '.join(names)}")
    if len(names) == 1:
        return
    if len(names) > 2 or names[0] == names[1]:
        raise ValueError(f"serve takes one engine or two different ones, got {' '.join(names)}")
    if scale.num_replicas:
        raise ValueError("--replicas makes several engines of one milestone: name only one")
    if not settings.live_page:
        raise ValueError("a second engine is for the live page only: name one, or drop "
                         "--no-live-page")  # fmt: skip


def open_engines(names: list[str], config: EngineConfig) -> dict[str, LLMEngine]:
    """Return the engines by name. They share the model that the first one has loaded."""
    builds: list[Callable[..., LLMEngine]] = [load(name).LLMEngine for name in names]
    first = builds[0](config)
    try:
        others = [build(config, first.loaded) for build in builds[1:]]
    except BaseException:
        first.close()
        raise
    return dict(zip(names, [first, *others], strict=True))


def run(served: dict[str, LLMEngine], settings: ServerSettings, console: Console) -> int:
    """Serve until a signal arrives. Print the URL when the server accepts connections.

    served: the engine of the API, and perhaps one that the live page shows beside it.
    """
    from .server.run import Server  # it needs the extra

    (milestone, engine), *others = served.items()

    def ready(address: str) -> None:
        model = settings.served_model_name or engine.loaded.name
        console.print(f"{milestone} serves {model} at {address}/v1 (Ctrl-C drains and stops)")
        if settings.live_page:
            shown = " beside ".join(served) if others else "chats, and the engine"
            console.print(f"{shown} step by step: {address}/")
        sys.stdout.flush()

    try:
        server = Server(engine, settings, ready, *(other for _, other in others))
    except ValueError as error:  # adapters that cannot be loaded
        for other in reversed(served.values()):  # the first one owns the model
            other.close()
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
