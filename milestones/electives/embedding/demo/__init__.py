"""Texts and vectors in the same steps, live: `python -m milestones demo embedding`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

from argparse import Namespace  # noqa: E402

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from common import (  # noqa: E402
    EngineConfig,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
)
from common.displays.comparison import (  # noqa: E402
    Figure,
    counter,
    workload_of,
)
from common.displays.dashboard import Dashboard  # noqa: E402
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
from common.displays.shapes import summary_table  # noqa: E402
from common.tracing.data import TraceData  # noqa: E402

from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from .lanes import LivePanels  # noqa: E402

NAME = __name__.split(".")[-2]
ARRIVE_EVERY = 3  # steps
BUDGET = 24  # tokens of a step: so few that a prompt takes several steps
POOLING = PoolingParams("MEAN")
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "prompt tokens computed": counter("prefill_tokens"),
}
LOOK = (
    "Look at the requests v0, v1, ...: their prompts are computed in the same steps as the texts, "
    "and no token follows."
)
SEEN = "A vector costs the prompt and no decode. The texts of the same steps do not change."


def main() -> None:
    """Answer questions and embed them in the same steps; then the texts alone, also on m5."""
    args = parser("Vectors beside texts.", requests=8, max_tokens=24).parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_num_seqs=6, page_size=8, num_pages=256,
        max_num_batched_tokens=BUDGET,
    )  # fmt: skip
    asked = chats(args.requests)
    with open_engine(LLMEngine, config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        with recorded(engine, args, console) as trace:
            finals = serve(engine, asked, trace.data, args, console)
        show_steps(engine, finals, console)
        show_neighbours(asked, finals, console)
        prompts = [finals[f"r{number}"].prompt_token_ids for number in range(len(asked))]
        compare(
            NAME,
            workload_of(engine, prompts, args, costs),
            FIGURES,
            console,
            "the texts alone, all at once",
        )
    say(console, f"\n{SEEN}")


def serve(
    engine: LLMEngine, asked: list[str], trace: TraceData, args: Namespace, console: Console
) -> dict[str, RequestOutput]:
    """Serve each question as a text `r` and as a vector `v`. Return the final outputs by name."""
    panels, finals = LivePanels(engine, trace, console), dict[str, RequestOutput]()
    waiting, steps = list(enumerate(asked)), 0
    with Dashboard(engine, "requests", console, panels) as dashboard:
        while waiting or engine.has_unfinished_requests():
            if steps % ARRIVE_EVERY == 0 and waiting:
                number, question = waiting.pop(0)
                send(engine, number, question, args.max_tokens)
                dashboard.add(f"r{number}", question)
                dashboard.add(f"v{number}", question)
            outputs = dashboard.step()
            finals |= {output.request_id: output for output in outputs if output.finished}
            steps += 1
            if args.check:
                engine.check_invariants()
    return finals


def send(engine: LLMEngine, number: int, question: str, max_tokens: int) -> None:
    """Add a question twice: for an answer, and for its vector."""
    prompt = engine.input_processor.apply_chat_template([{"role": "user", "content": question}])
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    engine.add_request(prompt, params, f"r{number}")
    engine.add_request(question, POOLING, f"v{number}")


def show_steps(engine: LLMEngine, finals: dict[str, RequestOutput], console: Console) -> None:
    """Print what the engine has computed for texts and for vectors."""
    vectors = [output for output in finals.values() if isinstance(output, PoolingRequestOutput)]
    tokens = sum(len(output.prompt_token_ids) for output in vectors)
    stats = engine.stats()
    console.print(
        f"{stats.num_steps} steps computed {stats.prefill_tokens} tokens of prompts and "
        f"{stats.decode_tokens} of texts, at most {BUDGET} in a step"
    )
    console.print(f"{tokens} tokens of the prompts became {len(vectors)} vectors")


def show_neighbours(asked: list[str], finals: dict[str, RequestOutput], console: Console) -> None:
    """Print for each question the other one with the most similar vector."""
    table = summary_table("questions that are most alike", "similarity", "question", "most alike")
    table.columns[0].justify, table.columns[0].min_width = "right", len("similarity")
    for column in table.columns[1:]:
        column.justify = "left"
    vectors = torch.stack([vector_of(finals[f"v{number}"]) for number in range(len(asked))])
    similarity = vectors @ vectors.T - 2 * torch.eye(len(asked))  # a question is not its own
    for number, question in enumerate(asked):
        best = int(similarity[number].argmax())
        table.add_row(f"{similarity[number, best]:.3f}", question, asked[best])
    if len(asked) > 1:
        console.print(table)


def vector_of(output: RequestOutput) -> torch.Tensor:
    """Return the vector of a final output, [H] float32."""
    assert isinstance(output, PoolingRequestOutput) and output.outputs.data is not None
    return output.outputs.data
