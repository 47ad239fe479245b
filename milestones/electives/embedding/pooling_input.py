"""`PoolingInputProcessor`: from a prompt and `PoolingParams` to a pooling request.

Requests for text go through it too, as in the other engines.
"""

from __future__ import annotations

from collections.abc import Callable

from common import EngineConfig, LoadedModel, PoolingParams, Prompt, Request, SamplingParams
from common.inputs import NO_POOLING
from common.text.input_processor import InputProcessor
from common.text.output_text import OutputText

from .pooling_request import PoolingRequest


class PoolingInputProcessor(InputProcessor):
    """Also makes pooling requests, or refuses them and names the field (I4)."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        is_in_use: Callable[[str], bool],
        now: Callable[[], float],
        hidden_size: int | None,
    ) -> None:
        """hidden_size: the size of a hidden state; None if the model does not show its states."""
        super().__init__(loaded, config, is_in_use, now)
        self.hidden_size = hidden_size

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Return a new request. With `PoolingParams`, it is a pooling request.

        The prompt of a pooling request may have `max_model_len` tokens, because no output token
        follows. It draws no seed: those of other requests do not change.
        """
        if not isinstance(params, PoolingParams):
            return super().make_request(prompt, params, request_id)
        self.require_open()
        if self.hidden_size is None:
            raise ValueError(f"params: {NO_POOLING}")
        if params.dimensions is not None and params.dimensions > self.hidden_size:
            raise ValueError(
                f"dimensions must be at most {self.hidden_size}, the size of the model's hidden "
                f"states, got {params.dimensions}"
            )
        token_ids, text = self.tokenize(prompt, num_outputs=0)[:2]
        return PoolingRequest(
            self._check_request_id(request_id),
            text,
            token_ids,
            params,
            text=OutputText(self.tokenizer, SamplingParams()),
            arrival_time=self.now(),
        )
