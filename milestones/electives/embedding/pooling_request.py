"""`PoolingRequest`: a request for one vector, and not for text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common import PoolingOutput, PoolingParams, PoolingRequestOutput, Request, SamplingParams

if TYPE_CHECKING:
    import torch

    from common.text.output_text import OutputText


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
