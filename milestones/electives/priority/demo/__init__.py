"""Urgent requests that preempt others, and the same requests on m5: `milestones demo priority`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from common import EngineConfig, Prompt, SamplingParams  # noqa: E402
from common.displays.comparison import (  # noqa: E402
    Figure,
    counter,
    seconds,
    workload_of,
)
from common.displays.demo import engine_options, make_console, open_engine, parser, recorded  # noqa: E402
from common.displays.serving import serve  # noqa: E402
from common.displays.workload import percentile  # noqa: E402

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
        number = int((request_id or "r0").lstrip("r"))
        priority = -1 if number % EVERY == EVERY - 1 else priority
        return super().add_request(prompt, params, request_id, priority=priority)


def main() -> None:
    """Serve conversations live, some of them urgent; then the same requests on m5."""
    args = parser("Urgent requests preempt others.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=3, page_size=8, num_pages=128)
    with open_engine(DemoEngine, config, console) as engine:
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        cache = engine.core.scheduler.kv_cache.radix_cache
        preemption = engine.core.scheduler.preemption
        console.print(
            f"one request in {EVERY} was urgent: {preemption.num_preemptions} "
            f"requests were preempted, {cache.num_written} pages copied to the host, and "
            f"{cache.num_loaded} back"
        )
        compare(NAME, workload_of(engine, prompts, args), FIGURES, console)
