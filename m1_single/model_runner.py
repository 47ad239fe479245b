"""`ModelRunner`: turns a scheduled batch into tensors, runs the model, and samples a token.

Upholds I1: the position of an input token is the number of tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from common import Request
from common.sampling.logprobs import with_prompt_logprobs
from common.sampling.sampler import SamplerOutput, SamplingMetadata, sample

from .schedule_batch import ScheduleBatch


class ModelRunner:
    """Runs a Hugging Face model, and keeps the `past_key_values` of the running request."""

    def __init__(self, model: PreTrainedModel, use_cache: bool) -> None:
        self.model = model
        self.use_cache = use_cache
        self.past_key_values: dict[Request, Cache] = {}

    @torch.inference_mode()
    @with_prompt_logprobs
    def run(self, batch: ScheduleBatch) -> SamplerOutput:
        """Compute the scheduled tokens and sample the next one."""
        if not batch.requests:
            return SamplerOutput.empty()
        (request,) = batch.requests
        start, device = request.num_computed_tokens, self.model.device
        # The lesson: with the cache, `start` is where the last step ended. Without it, it is 0.
        input_ids = torch.tensor([request.token_ids[start:]], device=device)  # [1, T]
        position_ids = torch.arange(start, request.num_tokens, device=device)[None]  # [1, T]
        metadata = SamplingMetadata.from_requests([request], device)
        logits = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=self._cache_of(request),
            use_cache=self.use_cache,
            logits_to_keep=1,
        ).logits  # [1, 1, V]
        return sample(logits[:, -1], metadata)

    def free(self, requests: Iterable[Request]) -> None:
        """Drop the keys and values of requests. A request that goes on computes them again."""
        for request in requests:
            self.past_key_values.pop(request, None)
            request.num_computed_tokens = 0

    def check_invariants(self, running: list[Request]) -> None:
        """Raise `AssertionError` if keys and values do not belong to the running request."""
        for request, cache in self.past_key_values.items():
            assert request in running, f"I3: {request} has keys and values, but it does not run"
            assert cache.get_seq_length() == request.num_computed_tokens, (
                f"I1: {request} has keys and values of {cache.get_seq_length()} tokens"
            )

    def _cache_of(self, request: Request) -> Cache | None:
        """Return the request's own cache. The first step of a request creates it."""
        if not self.use_cache:
            return None
        if request not in self.past_key_values:
            self.past_key_values[request] = DynamicCache(config=self.model.config)
        return self.past_key_values[request]
