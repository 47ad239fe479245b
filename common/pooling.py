"""`PoolingParams` and `PoolingRequest`: a request for one vector, and not for text.

All engines read the parameters. Only the elective `embedding` can compute such a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .outputs import PoolingOutput, PoolingRequestOutput
from .request import Request
from .sampling.params import SamplingParams
from .text.output_text import OutputText
from .validation import require_choice, require_int

NO_POOLING = (
    "this engine makes no embeddings; the elective embedding makes them, of models that have an "
    "output embedding"
)


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector. The names are vLLM's.

    Wrong values raise `ValueError` (I4).

    pooling_type: `LAST` takes the hidden state of the last token, `MEAN` the mean over all tokens.
        Which one is right depends on the training of the model. There is no `CLS`: with causal
        attention, the first token has seen no other token.
    normalize: divide the vector by its length. A vector of zeros stays as it is.
    dimensions: keep only so many numbers from the beginning of the vector, before it is normalized.
        It makes sense for models that were trained for it (Matryoshka embeddings). None: all.
    """

    pooling_type: Literal["LAST", "MEAN"] = "LAST"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        require_choice("pooling_type", self.pooling_type, ("LAST", "MEAN"))
        require_choice("normalize", self.normalize, (True, False))
        require_int("dimensions", self.dimensions, low=1, optional=True)


class PoolingRequest(Request):
    """A request for one vector. It has no output tokens, and ends when its prompt is computed.

    Schedulers see a request with `max_tokens=1` that never gets its token: it needs KV memory for
    its prompt, and for nothing else.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        text: OutputText,
        arrival_time: float,
    ) -> None:
        super().__init__(
            request_id,
            prompt,
            prompt_token_ids,
            SamplingParams(max_tokens=1, temperature=0),
            seed=0,
            max_model_len=len(prompt_token_ids) + 1,
            text=text,
            arrival_time=arrival_time,
        )
        self.pooling_params = params
        # MEAN: the sum of the hidden states of the computed chunks, [H] float32 on the host.
        self.partial_sum: torch.Tensor | None = None
        self.data: torch.Tensor | None = None  # the result, [dimensions] float32 on the host

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether the vector depends on the hidden state of every token."""
        return self.pooling_params.pooling_type == "MEAN"

    def output(self) -> PoolingRequestOutput:
        """Return the final output. A pooling request has no earlier one."""
        assert self.finish_reason is not None, "a pooling request has only a final output"
        shared = super().output()
        return PoolingRequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            PoolingOutput(self.data, self.finish_reason, self.error),
            True,
            shared.metrics,
        )
