"""A selection of transformers' models: each engine serves them correctly or refuses them by name.

`python -m tests.helpers.sweep_models` tries all of them in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.sweep_models import SERVED, feature, verdict

RECURRENT = "recurrent state"
LINEAR = "layers of type linear_attention"
POSITIONS = "positions from the length of the cache"
INTERFACE = "not called through transformers' AttentionInterface"
SINKS = "attention sinks"
SAME = "the feature for which m5 refuses it"


@dataclass(frozen=True)
class Case:
    """A model type, and the features for which m1, m2, and m3 to m5 refuse it. None: served.

    hybrid: the feature for which the elective hybrid_memory refuses it, if that is another one.
    """

    model_type: str
    m1: str | None = None
    m2: str | None = None
    paged: str | None = None
    small_windows: bool = False
    hybrid: str | None = SAME

    def __str__(self) -> str:
        return self.model_type + "-beyond-window" * self.small_windows

    def feature(self, milestone: str) -> str | None:
        """Return the feature that the refusal of an engine must name."""
        if milestone == "hybrid_memory" and self.hybrid != SAME:
            return self.hybrid
        return {"m1": self.m1, "m2": self.m2}.get(milestone[:2], self.paged)


def windowed(
    model_type: str, name: str = "sliding-window attention", hybrid: str | None = SAME
) -> Case:
    """Return a case with small windows: m1 serves it, with Hugging Face's own sliding cache."""
    return Case(model_type, None, name, name, small_windows=True, hybrid=hybrid)


CASES = [
    Case("llama"),
    Case("gemma"),
    Case("qwen3_moe"),
    Case("deepseek_v2"),  # keys and values of different sizes
    Case("deepseek_v3"),
    Case("llama4_text"),
    Case("bert"),  # a decoder, by its configuration
    windowed("mistral", hybrid=None),
    windowed("gpt_neo", hybrid=INTERFACE),
    windowed("llama4_text", "chunked attention"),
    Case("gpt_neo", None, None, INTERFACE),
    Case("bart", None, POSITIONS, POSITIONS),
    Case("mbart", None, POSITIONS, POSITIONS),
    Case("pegasus", None, POSITIONS, POSITIONS),
    Case("marian", None, POSITIONS, POSITIONS),
    Case("trocr", None, POSITIONS, INTERFACE),
    Case("xglm", None, None, INTERFACE),
    Case("falcon", None, None, INTERFACE),
    Case("nemotron", None, None, "keyword arguments of the forward"),
    Case("gpt_oss", None, SINKS, SINKS, hybrid=None),
    Case("mamba", RECURRENT, LINEAR, LINEAR, hybrid=RECURRENT),
    Case("mamba2", RECURRENT, LINEAR, LINEAR, hybrid=RECURRENT),
    Case("falcon_mamba", RECURRENT, LINEAR, LINEAR, hybrid=RECURRENT),
    Case("jamba", None, LINEAR, LINEAR, hybrid=RECURRENT),
    Case("qwen3_next", None, LINEAR, LINEAR, hybrid=None),
    Case("minimax", LINEAR, LINEAR, LINEAR),
    Case("xlm", "not causal", "not causal", INTERFACE),
    Case("roberta", "positions of its own", "positions of its own", "positions of its own"),
    Case("bloom", None, "ALiBi", "ALiBi"),
    Case("gemma2", None, "soft-capping", "soft-capping", hybrid=None),
]


@pytest.mark.before("kv_quant")  # its answers are those of a cache that rounds
@pytest.mark.parametrize("case", CASES, ids=str)
def test_served_right_or_refused_by_name(milestone: str, case: Case) -> None:
    result = verdict(milestone, case.model_type, case.small_windows)
    if (expected := case.feature(milestone)) is None:
        assert result == SERVED
    else:
        assert case.model_type in result, "the error does not name the model"
        assert expected in feature(result)
