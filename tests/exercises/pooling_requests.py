"""Pooling requests without an engine, for tests of the elective `embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import PoolingParams, SamplingParams
from common.text.output_text import OutputText
from milestones.electives.embedding.pooling_request import PoolingRequest
from tests.helpers.fake_paged import TOKENIZER


def pooling_request(name: str, tokens: Sequence[int], kind: Any, **params: Any) -> PoolingRequest:
    """Return a request for a vector, which is not normalized unless `params` say so."""
    return PoolingRequest(
        name, None, list(tokens), PoolingParams(kind, **{"normalize": False, **params}),
        text=OutputText(TOKENIZER, SamplingParams()), arrival_time=0.0,
    )  # fmt: skip
