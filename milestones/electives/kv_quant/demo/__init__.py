"""The cache in 8 bits, live, and beside m5 with the same memory.

`python -m milestones demo kv_quant`
"""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from dataclasses import replace  # noqa: E402

from rich.console import Console  # noqa: E402

from common import EngineConfig, SamplingParams  # noqa: E402
from common.clock import StepCosts  # noqa: E402
from common.displays.comparison import (  # noqa: E402
    Figure,
    comparison,
    counter,
    run_milestones,
    workload_of,
)
from common.displays.demo import (  # noqa: E402
    chats,
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
from common.displays.workload import Workload  # noqa: E402

from ....chain import below, load, package, short  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..packing import SCALE_BYTES  # noqa: E402
from .agents import conversations  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
PAGES = 220
ANSWER = 24  # tokens of the answers that are compared
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "retractions": counter("num_retractions"),
    "prompt tokens computed": counter("prefill_tokens"),
}
LOOK = "Look at the pages: in the same memory, m5 would have fewer than a third of them."
SEEN = (
    "In the same memory there are more pages, so more requests run at once. Some answers are other "
    "answers, because the numbers of the cache are rounded."
)


def main() -> None:
    """Serve conversations live; the same on m5 in the same memory; then a few answers of both."""
    args = parser("The cache in 8 bits.", requests=12, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(**engine_options(args), max_num_seqs=12, page_size=8, num_pages=PAGES)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        arrivals = conversations(args.requests, engine.config)
        with recorded(engine, args, console) as trace:
            panels = LivePanels(engine, trace.data, console)
            prompts = serve(engine, arrivals, panels, args, console)
        compare_memory(engine, workload_of(engine, prompts, args, costs), console, costs)
        show_answers(engine, console)
    say(console, f"\n{SEEN}")


def pages_in_float(engine: LLMEngine) -> int:
    """Return how many pages of m5 take the memory of this engine's pool."""
    pool, itemsize = engine.core.runner.kv_pool, engine.loaded.model.dtype.itemsize
    lines = [memory[:, 0] for memory in (*pool.keys, *pool.values)]
    in_float = sum(x.numel() // x.shape[-1] * (x.shape[-1] - SCALE_BYTES) for x in lines) * itemsize
    return PAGES * sum(x.nbytes for x in lines) // in_float


def compare_memory(
    engine: LLMEngine, workload: Workload, console: Console, costs: StepCosts
) -> None:
    """Serve the requests on m5 and on this engine, each with as many pages as the memory holds."""
    milestone, pages = below(NAME), pages_in_float(engine)
    assert milestone is not None, "an elective lies on a milestone"
    small = replace(workload, config={**workload.config, "num_pages": pages})
    results = run_milestones({milestone: small, package(NAME): workload}, console)
    named = {engine.rpartition(".")[2]: result for engine, result in results.items()}
    title = f"all at once in the same memory: {pages} pages of {short(milestone)}, {PAGES} here"
    console.print(comparison(title, named, FIGURES, costs))


def show_answers(engine: LLMEngine, console: Console) -> None:
    """Answer questions on both engines, and print how many tokens are equal."""
    params = SamplingParams(max_tokens=ANSWER, temperature=0)
    conversations = [[{"role": "user", "content": question}] for question in chats(6)]
    ours = engine.chat(conversations, params, progress=False)
    milestone = below(NAME)
    assert milestone is not None, "an elective lies on a milestone"
    with load(milestone).LLMEngine(engine.config, engine.loaded) as lower:
        theirs = lower.chat(conversations, params, progress=False)
    table = summary_table(
        "greedy answers of both engines", "question", "equal tokens", "from there on"
    )
    table.columns[0].justify = table.columns[2].justify = "left"
    for question, a, b in zip(chats(6), ours, theirs, strict=True):
        tokens = [x.outputs[0].token_ids for x in (a, b)]
        pairs = enumerate(zip(*tokens, strict=False))
        first = next((n for n, (x, y) in pairs if x != y), min(map(len, tokens)))
        decoded = engine.loaded.tokenizer.decode(tokens[0][first : first + 5])
        rest = str(decoded).replace("\n", " ")
        is_equal = first == len(tokens[0]) == len(tokens[1])
        table.add_row(question, f"{first} of {len(tokens[0])}", "the same" if is_equal else rest)
    console.print(table)
