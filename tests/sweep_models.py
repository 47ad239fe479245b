"""Every causal language model of transformers, on every engine: served right, or refused by name.

    python -m tests.sweep_models             all of them, into milestones/MODELS.md
    python -m tests.sweep_models bart xlm    some, on the screen

A model is tiny and random. An engine that accepts it must give the tokens of a full recompute:
alone, and among longer and shorter requests, with prompts of one token and contexts beyond the
model's windows.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common import EngineConfig, LoadedModel, UnsupportedModelError
from common.model_passes import apply_passes
from common.tiny_models import byte_tokenizer
from tests.conftest import MILESTONES, checked_engine_class
from tests.oracle import TIE, drain, greedy
from tests.tiny_configs import NOT_BUILT, tiny_config

PAGE = Path(__file__).resolve().parent.parent / "milestones" / "MODELS.md"
MODEL_TYPES = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_BUILT.keys())
MAX_MODEL_LEN = 64
NEW_TOKENS = 8
PROMPTS = (tuple(5 + 31 * i % 250 for i in range(37)), (7,), (9, 200, 3, 77, 140))
SERVED = "served"


@dataclasses.dataclass(frozen=True)
class Answer:
    """The greedy tokens of a full recompute, and the gap between the two best logits of each."""

    token_ids: list[int]
    gaps: list[float]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to serve, and what it must answer to each of `PROMPTS`."""

    loaded: LoadedModel
    answers: list[Answer]


@functools.lru_cache(maxsize=1)
def subject(model_type: str, small_windows: bool = False) -> Subject:
    """A tiny random model. Its answers are computed before the faster modules are put in."""
    config = tiny_config(model_type, small_windows=small_windows)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    answers = [recompute(model, prompt) for prompt in PROMPTS]
    apply_passes(model)
    return Subject(LoadedModel(f"tiny {model_type}", model, byte_tokenizer()), answers)


@torch.inference_mode()
def recompute(model: PreTrainedModel, prompt: Sequence[int]) -> Answer:
    """Compute all tokens anew for each next one: no cache that could be wrong."""
    tokens, gaps = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return Answer(tokens[len(prompt) :], gaps)


def verdict(milestone: str, model_type: str, small_windows: bool = False) -> str:
    """`SERVED`, or the sentence with which the model is refused.

    Raises `AssertionError` where a token is wrong, and whatever a step raises.
    """
    tried = subject(model_type, small_windows)
    config = EngineConfig(
        model=tried.loaded.name, device="cpu", max_model_len=MAX_MODEL_LEN, page_size=4,
        num_pages=80, max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    try:
        engine = checked_engine_class(milestone)(config, tried.loaded)
    except UnsupportedModelError as error:
        return str(error)
    params = greedy(NEW_TOKENS, ignore_eos=True)
    with engine:
        for prompt, answer in zip(PROMPTS, tried.answers, strict=True):
            (output,) = engine.generate([list(prompt)], params)
            require_same(answer, output.outputs[0].token_ids, "alone")
        for order in ((0, 1, 2), (1, 2, 0)):
            names = {}
            for index in order:  # each joins while the others decode
                names[engine.add_request(list(PROMPTS[index]), params)] = index
                for output in engine.step():
                    assert not output.finished
            for name, outputs in drain(engine).items():
                got = outputs[-1].outputs[0].token_ids
                require_same(tried.answers[names[name]], got, f"in a batch, prompt {names[name]}")
    return SERVED


def require_same(answer: Answer, got: list[int], where: str) -> None:
    """The same tokens, up to a place where the reference itself is undecided."""
    for index, (ours, theirs) in enumerate(zip(got, answer.token_ids, strict=True)):
        if ours != theirs:
            gap = answer.gaps[index]
            assert gap < TIE, f"{where}: token {index} is {ours}, not {theirs} (gap {gap:.4f})"
            return


def has_windows(model_type: str) -> bool:
    """Whether a configuration has a number for `SMALL_WINDOWS` to change."""
    plain, small = tiny_config(model_type), tiny_config(model_type, small_windows=True)
    return plain.to_dict() != small.to_dict()


def main(model_types: list[str]) -> None:
    """Print a line for each model and engine."""
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    for model_type in model_types or MODEL_TYPES:
        for small in (False, True) if has_windows(model_type) else (False,):
            for milestone in MILESTONES:
                try:
                    result = verdict(milestone, model_type, small)
                except (Exception, AssertionError) as error:
                    result = f"WRONG {type(error).__name__}: {error}"
                print(
                    model_type,
                    "small" if small else "-",
                    milestone,
                    result.replace("\n", " ")[:300],
                    sep="\t",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
