"""Urgent requests that preempt others, and the same requests on m5: `milestones demo priority`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from statistics import mean  # noqa: E402

from common import EngineConfig, Prompt, SamplingParams  # noqa: E402
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
from common.tracing.data import TraceData  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
EVERY = 4  # one request in so many is urgent
FIGURES: dict[str, Figure] = {
    "cache hit rate": lambda r: f"{r.hit_rate:.0%}",
    "steps": counter("num_steps"),
    "TTFT p95": lambda r: seconds(percentile(r.first_token_seconds, 95)),
    "ITL p50": lambda r: seconds(percentile(r.inter_token_seconds, 50)),
}
LOOK = f"Look at r3, r7, ...: one request in {EVERY} is urgent, and a running one makes way for it."
SEEN = (
    "Urgent requests wait less, and the others wait longer. The pages of a preempted request stay "
    "cached, here or at the host, so most of its tokens are not computed again."
)


class DemoEngine(LLMEngine):
    """An engine in which every fourth request is urgent, and the others are equally urgent."""

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        priority = -1 if is_urgent(request_id or "r0") else priority
        return super().add_request(prompt, params, request_id, priority=priority)


def is_urgent(request_id: str) -> bool:
    """Return whether a request of the demo is urgent."""
    return int(request_id[1:]) % EVERY == EVERY - 1


def first_token_seconds(trace: TraceData, urgent: bool) -> float:
    """Return the mean time to the first token of the urgent requests, or of the others."""
    times = [
        request.first_token - request.arrival
        for request in trace.requests
        if request.first_token is not None and is_urgent(request.request_id) == urgent
    ]
    return mean(times or [0.0])


def main() -> None:
    """Serve conversations live, some of them urgent; then the same requests on m5."""
    args = parser("Urgent requests preempt others.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=3, page_size=8, num_pages=128)
    with open_engine(DemoEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        cache = engine.core.scheduler.kv_cache.radix_cache
        preemption = engine.core.scheduler.preemption
        urgent, others = (first_token_seconds(trace.data, kind) for kind in (True, False))
        say(
            console,
            f"{preemption.num_preemptions} requests were preempted, {cache.num_written} pages were "
            f"copied to the host, and {cache.num_loaded} back. The mean time to the first token is "
            f"{seconds(urgent)} for urgent requests, and {seconds(others)} for the others.",
        )
        title = "without urgent requests, all at once"
        compare(NAME, workload_of(engine, prompts, args, costs), FIGURES, console, title)
    say(console, f"\n{SEEN}")
