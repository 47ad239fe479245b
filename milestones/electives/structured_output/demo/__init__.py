"""Grammars and masks, live, and what they cost: `python -m milestones demo structured_output`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from argparse import Namespace  # noqa: E402
from collections.abc import Iterable  # noqa: E402

import numpy as np  # noqa: E402
from rich.console import Console, RenderableType  # noqa: E402
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from common import EngineConfig, LoadedModel, RequestOutput, SamplingParams  # noqa: E402
from common.clock import StepCosts  # noqa: E402
from common.displays.dashboard import Dashboard  # noqa: E402
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
from common.displays.shapes import summary_table  # noqa: E402
from common.tracing.data import TraceData  # noqa: E402

from ....extras import missing  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..grammar_manager import GrammarManager  # noqa: E402
from .gaps import LOOPS, traced  # noqa: E402
from .lanes import Lanes, LivePanels  # noqa: E402
from .questions import Question, questions  # noqa: E402

ARRIVE_EVERY = 2  # steps
LOOK = (
    "Look at the tokens that the grammars allow: the mask of a step depends on the token of the "
    "step before it."
)
SEEN = (
    "Delayed sampling lets the forward run before its mask is known, so grammars cost almost no "
    "time on the device."
)


def main() -> None:
    """Answer questions with and without grammars; then compare the gaps between forwards."""
    args = parser("Answers that follow a grammar.", requests=12, max_tokens=32).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=6, page_size=8, num_pages=256)
    with open_engine(LLMEngine, config, console) as engine:
        if line := missing("grammar"):
            console.print(f"Without grammars: {line}", soft_wrap=True)
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        asked = questions(args.requests)
        with recorded(engine, args, console) as trace:
            finals = serve(engine, asked, trace.data, args, console)
        show_answers(asked, finals, console)
        compare(engine.loaded, costs, args, console)
    say(console, f"\n{SEEN}")


def serve(
    engine: LLMEngine, asked: list[Question], trace: TraceData, args: Namespace, console: Console
) -> dict[str, RequestOutput]:
    """Serve the questions under a dashboard. Return the final output of each request."""
    panels, finals = GrammarPanels(engine, trace, console), dict[str, RequestOutput]()
    waiting, steps = list(enumerate(asked)), 0
    with Dashboard(engine, "requests", console, panels) as dashboard:
        while waiting or engine.has_unfinished_requests():
            if steps % ARRIVE_EVERY == 0 and waiting:
                number, question = waiting.pop(0)
                send(engine, f"r{number}", question, args.max_tokens)
                dashboard.add(f"r{number}", question.label)
            outputs = dashboard.step()
            finals |= {output.request_id: output for output in outputs if output.finished}
            steps += 1
            if args.check:
                engine.check_invariants()
    return finals


def send(engine: LLMEngine, name: str, question: Question, max_tokens: int) -> None:
    """Add a question to the engine; without its grammar if the library is missing."""
    talk = [{"role": "user", "content": question.text}]
    grammar = None if engine.input_processor.no_structured_outputs else question.grammar
    params = SamplingParams(max_tokens=max_tokens, temperature=0, structured_outputs=grammar)
    engine.add_request(engine.input_processor.apply_chat_template(talk), params, name)


class GrammarPanels:
    """For each running request with a grammar, what may come next; above the panels of m5."""

    def __init__(self, engine: LLMEngine, trace: TraceData, console: Console) -> None:
        self.engine = engine
        self.live = LivePanels(engine, trace, console)

    def __call__(self) -> Iterable[RenderableType]:
        manager, table = self.engine.core.scheduler.grammars, Table(box=None, pad_edge=False)
        for name, width in (("id", 4), ("allowed", 7), ("what may come next", None)):
            table.add_column(name, width=width, no_wrap=True)
        for request, allowed in zip(manager.grammars, allowed_tokens(manager), strict=True):
            texts = [repr(self.engine.loaded.tokenizer.decode([t])) for t in allowed[:8]]
            more = " ..." if len(allowed) > len(texts) else ""
            table.add_row(request.request_id, str(len(allowed)), Text(" ".join(texts) + more))
        for request in manager.queue:
            table.add_row(request.request_id, "", Text("its grammar is being compiled", "dim"))
        yield Panel(table, title="grammars: tokens that the next mask allows", title_align="left")
        yield from self.live()


def allowed_tokens(manager: GrammarManager) -> list[list[int]]:
    """Return the tokens that each grammar allows next, in the order of `manager.grammars`."""
    _rows, bits = manager.masks(list(manager.grammars))
    flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in flags]


def show_answers(asked: list[Question], finals: dict[str, RequestOutput], console: Console) -> None:
    """Print the answers that had a grammar, and whether they follow it."""
    table = summary_table("answers with a grammar", "id", "ended by", "follows it", "answer")
    for number, question in enumerate(asked):
        completion = finals[f"r{number}"].outputs[0]
        if question.grammar is not None:
            cut = "it was cut" if completion.finish_reason == "length" else "NO"
            verdict = "yes" if question.is_satisfied(completion.text) else cut
            reason, text = str(completion.finish_reason), Text(" ".join(completion.text.split()))
            table.add_row(f"r{number}", reason, verdict, text)
    console.print(table)


def compare(loaded: LoadedModel, costs: StepCosts, args: Namespace, console: Console) -> None:
    """Show the gap between forwards: without grammars, and with them in three loops."""
    loops = LOOPS[:1] if missing("grammar") else LOOPS
    say(
        console,
        f"{args.requests} requests of {args.max_tokens} tokens in virtual time, once for each way "
        "to run the loop:",
    )
    columns = ("loop", "gap, median", "throughput", "ratio")
    table = summary_table("the gap between two forwards", *columns)
    panels, first = list[RenderableType](), None
    for loop in loops:
        with console.status(f"{loop.name} …"):
            trace, gaps = traced(
                loaded, loop, costs, num_requests=args.requests, max_tokens=args.max_tokens
            )
        rate = gaps.tokens_per_second
        first = first or rate
        table.add_row(
            loop.name, f"{gaps.median_ms:.2f} ms", f"{rate:.0f} tokens/s", f"{rate / first:.2f}"
        )
        panels.append(Lanes(trace, console).panel(loop.name))
    console.print(table, *panels[:3])
