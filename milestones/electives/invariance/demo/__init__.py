"""One prompt, alone and among others, in each variant: `python -m milestones demo invariance`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

import re  # noqa: E402
from collections.abc import Iterator  # noqa: E402

from rich.table import Table  # noqa: E402

from common import EngineConfig, SamplingParams, load_model  # noqa: E402
from common.displays.comparison import Figure, counter, workload_of  # noqa: E402
from common.displays.demo import (  # noqa: E402
    engine_options,
    in_virtual_time,
    look,
    make_console,
    open_engine,
    parser,
    recorded,
    say,
)
from common.displays.serving import serve  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..first_difference import Recording, first_difference, recording  # noqa: E402
from ..variants import VARIANTS  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
ASKED = SamplingParams(8, temperature=0, ignore_eos=True)
FIGURES: dict[str, Figure] = {"steps": counter("num_steps")}
LOOK = (
    "Look at the batches: their sizes change from step to step. An answer must not depend on them."
)
SEEN = (
    "Where the order of a sum depends on the batch, the difference begins in the operation that "
    "the variant has changed. Sums in bfloat16 in a fixed order have no difference."
)


def main() -> None:
    """Serve requests live, on the exact engine and on m5; then one prompt in each variant."""
    args = parser("One answer, and engines that have many.", requests=8, max_tokens=16).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        model = engine.loaded.name
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console)
    table = Table(
        "variant",
        "a sum depends on",
        "first difference (token: operation)",
        box=None,
        padding=(0, 2),
    )
    with console.status("one prompt, alone and among others ..."):
        for row in differences(model):
            table.add_row(*row)
    console.print(table)
    say(console, f"\n{SEEN}")


def differences(model: str) -> Iterator[tuple[str, str, str]]:
    """For each variant, yield what it depends on, and where two runs differ first."""
    loaded = {
        readable: load_model(EngineConfig(model=model, device="cpu", readable=readable))
        for readable in (False, True)
    }
    for name, variant in VARIANTS.items():
        runs = []
        for count in (0, 5):
            config = EngineConfig(
                model=model, device="cpu", num_pages=64, max_model_len=128, enable_overlap=False,
                max_num_batched_tokens=16 if count else 512,
            )  # fmt: skip
            with LLMEngine(config, loaded[name != "exact"], variant=name) as engine:
                runs.append(recorded_run(engine, count))
        found = first_difference(*runs)
        place = "none"
        if found is not None:
            operation = re.sub(r"model\.(layers\.)?|self_attn\.", "", found.operation)
            place = f"{found.position}: {operation}"
        yield name, variant.depends_on or "nothing", place


def recorded_run(engine: LLMEngine, num_others: int) -> Recording:
    """Return the recording of a prompt of 24 tokens beside some others."""
    with recording(engine, "asked") as found:
        for number in range(num_others):
            engine.add_request([number + 5] * (4 + number), ASKED)
        engine.add_request([*range(20, 44)], ASKED, "asked")
        while engine.has_unfinished_requests():
            engine.step()
    return found
