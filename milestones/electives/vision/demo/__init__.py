"""Questions about a few images, live: `python -m milestones demo vision`."""

from __future__ import annotations

from ... import path_below

__path__.append(path_below(__name__))

import copy  # noqa: E402
from argparse import Namespace  # noqa: E402
from dataclasses import replace  # noqa: E402
from itertools import groupby  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

from common import EngineConfig, SamplingParams, TokensPrompt  # noqa: E402
from common.displays.comparison import Figure, counter, workload_of  # noqa: E402
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
from common.hf.tiny import TINY, VISION  # noqa: E402
from common.tracing.data import TraceData  # noqa: E402

from ....lab.instruments.random_images import Piece, image_of, prompt_of  # noqa: E402
from ...demos import compare  # noqa: E402
from .. import LLMEngine  # noqa: E402
from ..kv_cache import IMAGE_KEY  # noqa: E402
from ..radix_cache import TreeNode  # noqa: E402
from .lanes import LivePanels  # noqa: E402
from .panels import Panels  # noqa: E402

NAME = __name__.split(".")[-2]
MODEL = "tiny-qwen2_vl"
FIGURES: dict[str, Figure] = {
    "steps": counter("num_steps"),
    "prompt tokens computed": counter("prefill_tokens"),
}
IMAGES: dict[str, tuple[int, int, int]] = {"dog": (1, 4, 5), "map": (2, 6, 6), "cat": (3, 3, 4)}
NAMES = {image_of(*image).digest: name for name, image in IMAGES.items()}
ASKED = ("dog", "dog", "map", "dog", "cat", "map", "cat", "dog")  # the images of the questions
QUESTIONS = ("What is it?", "How many are there?", "Where is it?", "Which colour has it?")
START, END = 259, 260  # the tokens around an image
ARRIVE_EVERY = 3  # steps
BUDGET = 16  # tokens of a step: so few that a chunk ends inside an image
LOOK = (
    "Look at the prompts: an image takes as many tokens as it has embeddings. A second question "
    "about an image finds its tokens in the prefix cache."
)
SEEN = (
    "Each image was encoded once. Without images, the engine does the work of m5. The images and "
    "the model are random: read the counters, not the text."
)


def main() -> None:
    """Ask questions about images. Show what was computed, and what was found in the caches."""
    options = parser("Questions about images.", requests=8, max_tokens=16)
    options.set_defaults(model=MODEL)
    args = options.parse_args()
    console = make_console(args)
    config = EngineConfig(
        **engine_options(args), max_num_seqs=6, page_size=4, num_pages=128,
        max_num_batched_tokens=BUDGET,
    )  # fmt: skip
    with open_with_encoder(config, console) as engine:
        costs = in_virtual_time(engine, args, console)
        look(console, LOOK)
        with recorded(engine, args, console) as trace:
            prompts = serve(engine, trace.data, args, console)
        show_images(engine, args.requests, console)
        texts = [[token for token in prompt if token < START] for prompt in prompts]
        workload = workload_of(engine, texts, args, costs)
        compare(NAME, workload, FIGURES, console, "the questions without images, all at once")
    say(console, f"\n{SEEN}")


def open_with_encoder(config: EngineConfig, console: Console) -> LLMEngine:
    """Open an engine. The images are random, so only a tiny model with an encoder can have them."""
    engine = open_engine(LLMEngine, config, console)
    if config.model.removeprefix(TINY) in VISION:
        return engine
    engine.close()
    say(console, f"The images are for tiny models with a vision encoder: {MODEL} takes its place.")
    return open_engine(LLMEngine, replace(config, model=MODEL), console)


class TreePanels(Panels):
    """The panels of m4. A node shows the names of its images."""

    def _label(self, node: TreeNode) -> Text:
        shown = copy.copy(node)
        shown.tokens = []
        label = super()._label(shown)
        for digest, run in groupby(node.tokens, lambda token: token // IMAGE_KEY // IMAGE_KEY):
            text = str(self.engine.loaded.tokenizer.decode([token % IMAGE_KEY for token in run]))
            label.append(f"[{NAMES[digest]}]" if digest else text.strip(), "default")
        return label


def question(engine: LLMEngine, number: int) -> tuple[str, TokensPrompt]:
    """Return a question in words, and its prompt: an image, and then the text."""
    name, text = ASKED[number % len(ASKED)], QUESTIONS[number % len(QUESTIONS)]
    tokens: list[Piece] = list(engine.loaded.tokenizer.encode(text))
    return f"{name}: {text}", prompt_of([START, IMAGES[name], END, *tokens])


def serve(
    engine: LLMEngine, trace: TraceData, args: Namespace, console: Console
) -> list[list[int]]:
    """Add a question every few steps, and step until all are answered. Return the prompts."""
    panels = LivePanels(engine, trace, console)
    panels.panels = TreePanels(engine, console)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0, ignore_eos=True)
    steps = number = 0
    prompts = []
    with Dashboard(engine, "requests", console, panels) as dashboard:
        while number < args.requests or engine.has_unfinished_requests():
            if steps % ARRIVE_EVERY == 0 and number < args.requests:
                text, prompt = question(engine, number)
                engine.add_request(prompt, params, f"r{number}")
                prompts.append(prompt.prompt_token_ids)
                dashboard.add(f"r{number}", text)
                number += 1
            dashboard.step()
            steps += 1
            if args.check:
                engine.check_invariants()
    return prompts


def show_images(engine: LLMEngine, count: int, console: Console) -> None:
    """Print how often each image was asked about, and what was computed for all questions."""
    table = summary_table("images", "image", "tokens", "questions")
    asked = [ASKED[number % len(ASKED)] for number in range(count)]
    for name, (_, rows, columns) in IMAGES.items():
        table.add_row(name, f"{rows} x {columns} = {rows * columns}", str(asked.count(name)))
    console.print(table)
    stats = engine.stats()
    console.print(
        f"{stats.num_encoded_images} images encoded for {count} questions; "
        f"{stats.prefill_tokens} prompt tokens computed, {stats.cached_prompt_tokens} found in the "
        f"prefix cache, in {stats.num_steps} steps"
    )
