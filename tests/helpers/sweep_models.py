"""Try every causal language model of transformers on every engine.

    python -m tests.helpers.sweep_models             try all models and write MODELS.md
    python -m tests.helpers.sweep_models bart xlm    try some models and print the results

An engine must serve a model correctly, or refuse it with an error that names the feature. Each
model is tiny and random. An engine that accepts it must produce the tokens of a full recompute,
for a request alone and in batches with longer and shorter requests. Prompts of one token and
contexts beyond the model's windows are among them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common import EngineConfig, LoadedModel, UnsupportedModelError
from common.fast.passes import apply_passes
from common.hf.tiny import byte_tokenizer
from milestones.lab.instruments.audit import audited_engine_class
from tests.conftest import MILESTONES, MODE, ROOT
from tests.helpers.oracle import (
    Reference,
    assert_same_tokens,
    completions,
    greedy,
    reference_of,
)
from tests.helpers.tiny_configs import NOT_BUILT, tiny_config

PAGE = ROOT / "milestones" / "docs" / "MODELS.md"
SWEPT = [*MILESTONES, "hybrid_memory"]  # the elective for models that the milestones refuse
MODEL_TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT.keys())
MAX_MODEL_LEN = 64
NEW_TOKENS = 8
PROMPTS = (tuple(5 + 31 * i % 250 for i in range(37)), (7,), (9, 200, 3, 77, 140))
SERVED = "served"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to serve, and what it must answer to each of `PROMPTS`."""

    loaded: LoadedModel
    answers: list[Reference]


@functools.lru_cache(maxsize=64)
def subject(model_type: str, small_windows: bool = False) -> Subject:
    """Return a tiny random model and its answers, computed before our passes change the model."""
    config = tiny_config(model_type, small_windows=small_windows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    answers = [recompute(model, prompt) for prompt in PROMPTS]
    apply_passes(model)
    return Subject(LoadedModel(f"tiny {model_type}", model, byte_tokenizer()), answers)


@torch.inference_mode()
def recompute(model: PreTrainedModel, prompt: Sequence[int]) -> Reference:
    """Return the greedy answer. Each token is computed from all tokens, without any cache."""
    tokens, logits = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
    return reference_of(tokens[len(prompt) :], torch.stack(logits))


def verdict(milestone: str, model_type: str, small_windows: bool = False) -> str:
    """Return `SERVED`, or the message with which the model is refused.

    Raises `AssertionError` if a token is wrong. An error of a step is raised as it is.
    """
    tried = subject(model_type, small_windows)
    config = EngineConfig(
        model=tried.loaded.name, device="cpu", max_model_len=MAX_MODEL_LEN, page_size=4,
        num_pages=80, max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    try:
        engine = audited_engine_class(milestone, MODE)(config, tried.loaded)
    except UnsupportedModelError as error:
        return str(error)
    params = greedy(NEW_TOKENS, ignore_eos=True)
    with engine:
        for prompt, answer in zip(PROMPTS, tried.answers, strict=True):
            (output,) = engine.generate([list(prompt)], params)
            assert_same_tokens(answer, output.outputs[0].token_ids)
        for order in ((0, 1, 2), (1, 2, 0)):
            names = {}
            for index in order:  # each request joins while the earlier ones decode
                names[engine.add_request(list(PROMPTS[index]), params)] = index
                for output in engine.step():
                    assert not output.finished
            for name, found in completions(engine).items():
                assert_same_tokens(tried.answers[names[name]], found.token_ids)
    return SERVED


def has_windows(model_type: str) -> bool:
    """Return whether `SMALL_WINDOWS` changes anything in a model's configuration."""
    plain, small = tiny_config(model_type), tiny_config(model_type, small_windows=True)
    return plain.to_dict() != small.to_dict()


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one model: for each engine `SERVED`, or the message of the refusal."""

    model_type: str
    small_windows: bool
    verdicts: dict[str, str]

    @property
    def cells(self) -> list[str]:
        """The cells of a table row: the name, then one cell for each milestone."""
        beyond = ", context beyond its window" if self.small_windows else ""
        return [f"{self.model_type}{beyond}", *map(feature, self.verdicts.values())]


def feature(sentence: str) -> str:
    """Return the feature that a refusal names: `... it has FEATURE. milestones/...`."""
    if sentence == SERVED:
        return "yes"
    found = re.search(r"it has (.*?)\. milestones/", sentence)
    # The sizes belong to the tiny model. The table is about the feature, so they are left out.
    return re.sub(r" \([^)]*=[^)]*\)", "", found[1]) if found else sentence


def rows(model_types: list[str]) -> Iterator[Row]:
    """Try models on the milestones and an elective. A verdict that begins with `WRONG` is a bug."""
    for model_type in model_types:
        for small in (False, True) if has_windows(model_type) else (False,):
            yield Row(model_type, small, {m: _verdict(m, model_type, small) for m in SWEPT})


def _verdict(milestone: str, model_type: str, small_windows: bool) -> str:
    try:
        return verdict(milestone, model_type, small_windows)
    except Exception as error:
        return f"WRONG {type(error).__name__}: {error}"


def page(tried: list[Row]) -> str:
    """Return the table as Markdown."""
    served = [sum(row.verdicts[m] == SERVED for row in tried) for m in SWEPT]
    types = len({row.model_type for row in tried})
    lines = [
        "# Which models each milestone serves",
        "",
        "Written by `python -m tests.helpers.sweep_models`. Do not edit it by hand.",
        "",
        f"transformers {transformers.__version__} can build {types} of its causal language models",
        "in a tiny size. Each milestone served each of these models with random weights, one",
        "request alone and then batches of longer and shorter requests. `yes` means that every",
        "token was that of a full recompute. In the other cases, the milestone refuses the model",
        "when it is loaded, and the error names the feature in the cell. The last column is of",
        "the elective for windows, soft caps, sinks and states. Rows with `yes`, by",
        f"column: {', '.join(map(str, served))} of {len(tried)}.",
        "",
        "Models with a vision encoder are not in this list. The elective vision serves images with",
        "`qwen2_vl` and `qwen2_5_vl`, and all milestones serve their text. The elective refuses",
        "other encoders by name, such as that of `qwen3_vl`.",
        "",
        "| model type | " + " | ".join(SWEPT) + " |",
        "|---" * (1 + len(SWEPT)) + "|",
        *("| " + " | ".join(row.cells) + " |" for row in tried),
        "",
        "## Not tried",
        "",
        "| model type | reason |",
        "|---|---|",
        *(f"| {name} | {reason} |" for name, reason in NOT_BUILT.items()),
        "",
    ]
    return "\n".join(lines)


def main(model_types: list[str]) -> int:
    """Print a line for each model, and write the page if all were tried.

    Returns 1 if any verdict is `WRONG`, else 0.
    """
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    console, tried = Console(), []
    for row in rows(model_types or MODEL_TYPES):
        tried.append(row)
        console.print(" | ".join(row.cells), highlight=False, markup=False)
    if not model_types:
        PAGE.write_text(page(tried), encoding="utf-8")
    return int(any("WRONG" in cell for row in tried for cell in row.cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
