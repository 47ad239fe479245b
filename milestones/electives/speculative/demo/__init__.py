"""Drafts that the model verifies, live, and beside m5: `python -m milestones demo speculative`."""

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
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "tokens computed": lambda r: str(r.stats["decode_tokens"] + r.stats["padding_tokens"]),
    "TTFT p95": lambda r: seconds(percentile(r.first_token_seconds, 95)),
    "ITL p50": lambda r: seconds(percentile(r.inter_token_seconds, 50)),
}
LOOK = "Look at the answers: when drafts are accepted, a request gets several tokens in one step."
SEEN = (
    "The model still chooses every token. Drafts save steps. Their price is positions that are "
    "computed in vain, and steps that do not overlap."
)


def main() -> None:
    """Serve conversations live; then the same requests on m5 and with drafts."""
    args = parser("Drafts that the model verifies.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        stats = engine.stats()
        console.print(
            f"{stats.num_draft_tokens} tokens were drafted, {stats.num_accepted_tokens} accepted: "
            f"{stats.num_steps} steps for {stats.decode_tokens} tokens"
        )
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console)
    say(console, f"\n{SEEN}")
