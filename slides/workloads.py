"""The worked examples that the decks show: the same three requests on every milestone."""

from __future__ import annotations

from typing import Any

from common import SamplingParams

# The same three requests run on every milestone. B ends when the model generates its stop string.
# A and C end by length. C begins with B's prompt and B's answer.
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

# There are two rows, so C waits until A or B ends. From m3 on, steps are so small that prompts are
# computed in chunks, and pages are so small that a figure can show how they fill.
PAGES: dict[str, Any] = {"max_num_batched_tokens": 8, "page_size": 2, "num_pages": 20}
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "m1_example": ("m1_single", {}),
    "m2_example": ("m2_continuous", {"max_num_batched_tokens": 32}),
    "m3_example": ("m3_paged", PAGES),
    "m3_retract": ("m3_paged", {**PAGES, "num_pages": 17}),
    "m4_example": ("m4_radix", PAGES),
    "m5_example": ("m5_overlap", PAGES),
}


# Two requests that generate more than the scheduler expects, in a pool that is too small for both.
LONGER = {
    "A": SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    "C": SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
}


def params_of(name: str) -> dict[str, SamplingParams]:
    """Return the requests of a worked example, each with its parameters."""
    return LONGER if name == "m3_retract" else PARAMS


def config_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return the milestone of a worked example and the configuration of its engine."""
    milestone, config = EXAMPLES[name]
    return milestone, {"max_num_seqs": 2, "max_model_len": 32, **config}
