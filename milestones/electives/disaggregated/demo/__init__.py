"""Two sides, live; their queues step by step; and the same requests beside m5.

`python -m milestones demo disaggregated`
"""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from collections.abc import Iterable  # noqa: E402

from rich.console import Console  # noqa: E402

from common import EngineConfig, Request, SamplingParams  # noqa: E402
from common.displays.comparison import Figure, counter, seconds, workload_of  # noqa: E402
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
from common.displays.shapes import summary_table  # noqa: E402
from common.displays.workload import percentile  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
PROMPT, CHUNK = 40, 64  # tokens of the prompts in the table of queues, and of a step
STEPS = 8  # that the table shows
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "TTFT p95": lambda r: seconds(percentile(r.first_token_seconds, 95)),
    "ITL p50": lambda r: seconds(percentile(r.inter_token_seconds, 50)),
    "ITL p99": lambda r: seconds(percentile(r.inter_token_seconds, 99)),
}
LOOK = (
    "Look at the lanes: they are those of the decode side. Every step computes one token of each "
    "request. Prompts are computed on the prefill side, which has a device of its own."
)
SEEN = (
    "No prompt makes the tokens of others late, so the latency between tokens hardly varies. The "
    "time to first token is no better: there is one machine for prompts, and pages must arrive."
)


def main() -> None:
    """Serve conversations live; print the queues of a few steps; then the same requests on m5."""
    args = parser("Prefill and decode apart.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_num_seqs=6, page_size=8, num_pages=256,
        max_num_batched_tokens=CHUNK,
    )  # fmt: skip
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        show_queues(engine, console)
        workload = workload_of(engine, prompts, args, costs)
        title = "all requests at once: m5 has one machine, the two sides have two"
        compare(NAME, workload, FIGURES, console, title)
    say(console, f"\n{SEEN}")


def show_queues(engine: LLMEngine, console: Console) -> None:
    """Serve four requests, and print which queues of both sides they are in after each step."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    for name in "ABCD":
        engine.add_request([ord(name)] * PROMPT, params, name)
    prefill, decode = engine.core.prefill.scheduler, engine.core.scheduler
    table = summary_table(
        f"four prompts of {PROMPT} tokens: where each is after a step",
        "step", "prefill: waiting", "running", "inflight", "decode: transfer", "waiting", "running",
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        engine.step()
        queues = (
            prefill.waiting_queue, prefill.running, prefill.inflight_queue,
            decode.transfer_queue, decode.waiting_queue, decode.running,
        )  # fmt: skip
        table.add_row(str(step), *map(_names, queues))
        if not engine.has_unfinished_requests():
            break
    while engine.has_unfinished_requests():
        engine.step()
    console.print(table)


def _names(requests: Iterable[Request]) -> str:
    return " ".join(request.request_id for request in requests)
