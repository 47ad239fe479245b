"""What users write and get for one vector in place of a text: plain data.

Only the elective `embedding` can compute such a request. Other engines refuse the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .outputs import FinishReason, RequestOutput
from .validation import require_choice, require_int

if TYPE_CHECKING:
    import torch

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


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The vector of a pooling request.

    data: [H] or [dimensions] float32, on the host; None if the request was aborted or failed.
    finish_reason, error: as those of `CompletionOutput`; `stop` if there is a vector.
    """

    data: torch.Tensor | None
    finish_reason: FinishReason
    error: str | None = None


@dataclass(slots=True, eq=False)
class PoolingRequestOutput(RequestOutput):
    """The only output of a pooling request, as in vLLM: `output.outputs.data` is the vector."""

    outputs: PoolingOutput  # type: ignore[assignment]  # one vector takes the place of the list
