"""The expected answers of tiny random models, computed by Hugging Face's own modules."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from common import EngineConfig, PoolingParams, Request, SamplingParams, load_model
from common.sampling.sampler import SamplingMetadata, sample
from common.text.output_text import OutputText

from ..instruments.random_adapter import merged_model
from .answers import Continuation, HashSource, Source

# A token is certain if no noise of this size changes it.
NOISE, NUM_NOISY = 1e-3, 12


class TinySource(Source):
    """A tiny random model. Each of its answers is computed once."""

    def __init__(self, name: str) -> None:
        config = EngineConfig(model=name, device="cpu")
        super().__init__(load_model(config))
        plain = load_model(config, plain=True).model
        self.models: dict[str | None, Any] = {None: plain}  # by the adapter that is merged into it
        self.known: dict[tuple[object, ...], Continuation] = {}

    def continuation(
        self,
        prompt: list[int],
        params: SamplingParams,
        max_tokens: int,
        adapter: str | None = None,
    ) -> Continuation:
        """Run the plain model and the sampler on this request alone."""
        p = params
        penalties = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
        sampling = (p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.structured_outputs)
        key = (*prompt, None, *sampling, *penalties, max_tokens, adapter)
        if key not in self.known:
            self.known[key] = self._compute(prompt, params, max_tokens, adapter)
        return self.known[key]

    @torch.inference_mode()
    def vector(self, prompt: list[int], params: PoolingParams) -> list[float]:
        """Return the vector of a prompt, from the hidden states of the plain model."""
        outputs = self.models[None](torch.tensor([prompt]), output_hidden_states=True)
        states = outputs.hidden_states[-1][0]  # [T, H]
        vector = states.mean(0) if params.pooling_type == "MEAN" else states[-1]
        vector = vector[: params.dimensions]
        return list((vector / vector.norm() if params.normalize else vector).tolist())

    @torch.inference_mode()
    def _compute(
        self, prompt: list[int], params: SamplingParams, max_tokens: int, adapter: str | None
    ) -> Continuation:
        if adapter is not None and adapter not in self.models:
            self.models[adapter] = merged_model(self.models[None], adapter)
        model = self.models[adapter]
        cache = DynamicCache(config=model.config)
        noise = torch.randn(
            NUM_NOISY, self.loaded.vocab_size, generator=torch.Generator().manual_seed(0)
        )
        fed, tokens, logprobs = prompt, list[int](), list[float]()
        while len(tokens) < max_tokens and not self.is_whole(params, tokens):
            logits = model(torch.tensor([fed]), past_key_values=cache).logits[0, -1:]  # [1, V]
            noisy = torch.cat([logits, logits + NOISE * noise])  # [1 + NUM_NOISY, V]
            drawn = self._sample(noisy, prompt, tokens, params)
            if len(set(drawn)) > 1:
                break
            fed = drawn[:1]
            tokens += fed
            logprobs.append(float(logits[0].log_softmax(-1)[fed[0]]))
        return Continuation(tokens, logprobs, self.is_whole(params, tokens))

    def _sample(
        self, logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
    ) -> list[int]:
        """Draw from each row as the next token of the same request."""
        seed = params.seed or 0
        text = OutputText(self.loaded.tokenizer, params)
        request = Request(
            "", None, prompt, params, seed=seed, max_model_len=512, text=text, arrival_time=0.0
        )
        request.token_ids += output
        rows = [request] * len(logits)
        if (allowed := self.allowed(params, output)) is not None:
            masked = torch.full_like(logits, -torch.inf)
            masked[:, allowed] = logits[:, allowed]  # no penalty changes -inf
            logits = masked
        tokens: list[int] = sample(
            logits, SamplingMetadata.from_requests(rows, "cpu")
        ).token_ids.tolist()
        return tokens


class Sources(dict[str, Source]):
    """The models by name. Each is made when it is first needed."""

    def __missing__(self, name: str) -> Source:
        self[name] = HashSource() if name == "hash" else TinySource(name)
        return self[name]
