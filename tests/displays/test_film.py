"""The film strip of a run shows what each step computed of each request."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from common import LLMEngine
from common.displays.film import film_strip
from common.tracing.trace import Trace
from tests.conftest import EngineFactory
from tests.helpers.oracle import greedy


def film(trace: Trace, width: int = 80) -> list[str]:
    """Return the lines of the strip inside its frame."""
    out = io.StringIO()
    with Console(width=width, file=out) as console:
        console.print(film_strip(trace.data, console))
    return [line[2:-2].rstrip() for line in out.getvalue().splitlines()[1:-1]]


def filmed(engine: LLMEngine, arrivals: dict[int, list[int]], max_tokens: int) -> Trace:
    """Serve prompts that arrive before these steps."""
    with Trace(engine) as trace:
        step = 0
        while step <= max(arrivals) or engine.has_unfinished_requests():
            if step in arrivals:
                engine.add_request(
                    arrivals[step],
                    greedy(max_tokens, ignore_eos=True),
                    f"r{len(trace.data.requests)}",
                )
            engine.step()
            step += 1
    return trace


@pytest.mark.before("disaggregated")  # the first token is one of the other side
def test_a_prompt_stops_the_others_in_one_milestone_only(
    milestone: str, make_engine: EngineFactory
) -> None:
    """The second request comes while the first one decodes. What each milestone does with it."""
    engine = make_engine(max_num_seqs=2, enable_overlap=False)
    trace = filmed(engine, {0: [5, 6, 7], 3: [8, 9]}, 6)
    first, second, legend = film(trace)
    expected = {
        "m1_single": ("r0 #█████", "r1    ···#█████"),
        "m2_continuous": ("r0 #██-███", "r1    #█████"),
    }
    assert (first, second) == expected.get(milestone, ("r0 #█████", "r1    #█████"))
    assert legend.startswith("a line is a request, a column is a step: ")
    assert ("- not computed" in legend) == (milestone == "m2_continuous")


@pytest.mark.since("m3_paged")
def test_a_retraction_is_seen(make_engine: EngineFactory) -> None:
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "page_size": 2,
        "num_pages": 12,
        "max_model_len": 24,
    }
    engine: Any = make_engine(**config)
    engine.core.scheduler.admission.new_token_ratio = 0.0
    lines = film(filmed(engine, dict.fromkeys(range(1), [5] * 4) | {1: [6] * 4, 2: [7] * 4}, 12))
    assert any("R" in line for line in lines[:3]) and "R retracted" in " ".join(lines[3:])


def test_a_long_run_fits_the_screen(make_engine: EngineFactory) -> None:
    trace = filmed(make_engine(), {0: [5, 6, 7]}, 90)
    row, *legend = film(trace, width=60)
    assert row == "r0 " + "#" + "█" * 44 and "a column is 2 steps" in " ".join(legend)
