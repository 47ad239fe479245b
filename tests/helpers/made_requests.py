"""Requests that no engine has made, for tests of sampling and of schedulers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common import Request, SamplingParams
from common.hf.tiny import byte_tokenizer
from common.text.output_text import OutputText

TOKENIZER = byte_tokenizer()


def request_with(
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2, 1),
    name: str = "r",
    end_token_ids: Sequence[int] = (),
    max_model_len: int = 100,
) -> Request:
    """Return a request that waits. Its parameters may be any."""
    return Request(
        name, None, list(prompt), params, seed=params.seed or 0, max_model_len=max_model_len,
        text=OutputText(TOKENIZER, params), arrival_time=0.0,
        end_token_ids=np.array(end_token_ids, dtype=np.int64),
    )  # fmt: skip
