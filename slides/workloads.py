"""The runs that the decks show: three requests on every rung, and each lesson's own comparison."""

from __future__ import annotations

from typing import Any

from common import SamplingParams

# The same three requests climb the whole ladder. B ends by what the model says, A and C by length,
# and C begins with the very words that B has asked and been told.
PROMPTS = {
    "A": "The days of the week are Monday, Tuesday,",
    "B": "The capital of France is",
    "C": "The capital of France is Paris. The capital of Italy is",
}
PARAMS = {
    "A": SamplingParams(max_tokens=5, temperature=0),
    "B": SamplingParams(max_tokens=6, temperature=0, stop=["."]),
    "C": SamplingParams(max_tokens=5, temperature=0),
}

# Two rows: C waits until somebody ends. From m3 on, steps so small that prompts come in chunks, and
# pages so small that one sees them fill.
PAGES: dict[str, Any] = {"max_num_batched_tokens": 8, "page_size": 2, "num_pages": 20}
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "m1_example": ("m1_single", {}),
    "m2_example": ("m2_continuous", {"max_num_batched_tokens": 32}),
    "m3_example": ("m3_paged", PAGES),
    "m3_retract": ("m3_paged", {**PAGES, "num_pages": 17}),
    "m4_example": ("m4_radix", PAGES),
    "m5_example": ("m5_overlap", PAGES),
}


# Two that say more than the scheduler expected of them, in a pool that is too small for both.
LONGER = {
    "A": SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    "C": SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
}


def params_of(name: str) -> dict[str, SamplingParams]:
    """Who takes part in a worked example, and what each asks for."""
    return LONGER if name == "m3_retract" else PARAMS


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """The rung of a worked example, and its engine's configuration."""
    rung, config = EXAMPLES[name]
    return rung, {"max_num_seqs": 2, "max_model_len": 32, **config}
