"""`InputProcessor`: what a user hands in becomes a `Request`, or is refused by name (I4)."""

from __future__ import annotations

import itertools
import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .config import EngineConfig
from .model_loader import LoadedModel
from .output_text import OutputText
from .request import Request
from .sampling_params import SamplingParams


class TokensPrompt(NamedTuple):
    """A prompt that is tokenized already, with the text it came from."""

    prompt_token_ids: list[int]
    prompt: str | None = None


Prompt = str | Sequence[int] | TokensPrompt
Message = dict[str, str]


class InputProcessor:
    """Tokenizes, validates, numbers and seeds new requests."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, in_flight: Callable[[str], bool]
    ) -> None:
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        assert config.max_model_len is not None
        self.max_model_len = config.max_model_len
        self.in_flight = in_flight
        self.closed = False
        self._numbers = itertools.count()
        self._seeds = random.Random(config.seed)

    def make_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Request:
        """Raise `ValueError`, naming the field and its limit, if the request cannot be served."""
        if self.closed:
            raise RuntimeError("the engine is closed")
        params = self._check_params(params)
        text, token_ids = self._tokenize(prompt)
        self._check_tokens(token_ids)
        return Request(
            self._check_request_id(request_id),
            text,
            token_ids,
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_model_len=self.max_model_len,
            text=OutputText(self.tokenizer, params),
            arrival_time=time.perf_counter(),
        )

    def apply_chat_template(self, messages: Sequence[Message]) -> TokensPrompt:
        """Messages of `{"role": ..., "content": ...}` as the model's own chat format."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                "messages: this model's tokenizer has no chat template; use generate()"
            )
        if not messages:
            raise ValueError("messages must not be empty")
        for message in messages:
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"messages must be dicts with 'role' and 'content': {message!r}")
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        # The template has written the special tokens already.
        return TokensPrompt(self.tokenizer.encode(text, add_special_tokens=False), text)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt must not be empty")
            return prompt, list(self.tokenizer.encode(prompt))
        if isinstance(prompt, TokensPrompt):
            return prompt.prompt, [_as_token_id(token) for token in prompt.prompt_token_ids]
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            return None, [_as_token_id(token) for token in prompt]
        raise ValueError(f"prompt must be a string or a list of token ids, got {prompt!r}")

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("prompt must not be empty: it has no tokens")
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"prompt holds token id {token_id}, outside the vocabulary "
                    f"[0, {self.vocab_size})"
                )
        if len(token_ids) + 1 > self.max_model_len:
            raise ValueError(
                f"prompt has {len(token_ids)} tokens; with one output token that is more than "
                f"max_model_len={self.max_model_len}"
            )

    def _check_params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {params!r}")
        for token_id in params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"stop_token_ids holds {token_id}, outside the vocabulary "
                    f"[0, {self.vocab_size})"
                )
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise ValueError(
                f"logprobs must be at most the vocabulary's size {self.vocab_size}, "
                f"got {params.logprobs}"
            )
        return params

    def _check_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if not self.in_flight(name))
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        if self.in_flight(request_id):
            raise ValueError(f"request_id {request_id!r} belongs to a request not yet finished")
        return request_id


def _as_token_id(token: Any) -> int:
    if isinstance(token, bool):
        raise ValueError(f"prompt must hold token ids, got {token!r}")
    try:
        return operator.index(token)
    except TypeError:
        raise ValueError(f"prompt must hold token ids, got {token!r}") from None
