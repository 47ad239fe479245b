"""Plans of several steps, live, and beside m5's overlap: `python -m milestones demo multi_step`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from common import EngineConfig  # noqa: E402
from common.displays.comparison import (  # noqa: E402
    Figure,
    counter,
    seconds,
    workload_of,
)
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
from common.displays.workload import percentile  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..in_flight import NUM_STEPS  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "tokens computed in vain": counter("padding_tokens"),
    "TTFT p95": lambda r: seconds(percentile(r.first_token_seconds, 95)),
    "ITL p50": lambda r: seconds(percentile(r.inter_token_seconds, 50)),
}
LOOK = (
    f"Look at the lanes: up to {NUM_STEPS} forwards follow one another, and then the device waits "
    "for the host."
)
SEEN = (
    "A plan hides the host in all steps but its last one. m5 hides it in every step, and computes "
    "nothing for requests that have ended."
)


def main() -> None:
    """Serve conversations live; then the same requests on m5 and on plans of several steps."""
    args = parser(f"Plans of {NUM_STEPS} steps.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console)
    say(console, f"\n{SEEN}")
