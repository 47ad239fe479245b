"""`InputProcessor`: converts user input to a `Request`, or refuses it and names the field (I4)."""

from __future__ import annotations

import functools
import itertools
import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..config import EngineConfig
from ..hf.loaded_model import LoadedModel
from ..inputs import NO_IMAGES, NO_POOLING, Message, PoolingParams, Prompt, TokensPrompt
from ..request import ParentRequest, Request
from ..sampling.params import SamplingParams
from ..validation import require_list, require_text, require_unicode, shown, size_of
from .output_text import OutputText

LONGEST_ID = 1000  # characters of a request id
# Shorter text is always tokenized (about 50 ms), so that an error can say how many tokens it has.
TOKENIZED_CHARACTERS = 2**16
NO_STRUCTURED_OUTPUTS = "this engine has no grammars; the elective structured_output has them"


class InputProcessor:
    """Tokenizes, validates, numbers and seeds new requests."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        is_in_use: Callable[[str], bool],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """is_in_use: whether a request id is taken. now: the clock of the engine."""
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.no_prompt_logprobs = loaded.no_prompt_logprobs
        assert config.max_model_len is not None
        self.max_model_len = config.max_model_len
        self.is_in_use = is_in_use
        self.now = now
        self.closed = False
        # Why requests with `structured_outputs` are refused; None where an engine has them.
        self.no_structured_outputs: str | None = NO_STRUCTURED_OUTPUTS
        self._numbers = itertools.count()
        self._seeds = random.Random(config.seed)

    def tokenize(self, prompt: Prompt, *, num_outputs: int = 1) -> TokensPrompt:
        """Return a prompt with its token ids. Any thread may call it, also during a step.

        num_outputs: the tokens that must fit after it: 0 for an embedding, otherwise 1.
        Raises `ValueError` if the prompt cannot be tokenized, or is too long.
        """
        text, token_ids = self._tokenize(prompt, num_outputs)
        self._check_tokens(token_ids, num_outputs)
        return TokensPrompt(token_ids, text)

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Return a new request.

        Raises `ValueError`, which names the field and its limit, if the request cannot be served.
        """
        self.require_open()
        params = self._check_params(params)
        token_ids, text = self.tokenize(prompt)[:2]
        return Request(
            self._check_request_id(request_id),
            text,
            token_ids,
            params,
            seed=self._seed_of(params),
            max_model_len=self.max_model_len,
            text=OutputText(self.tokenizer, params),
            arrival_time=self.now(),
            stop_token_ids=self._stop_token_ids(params),
            end_token_ids=self._end_token_ids(params),
        )

    def require_open(self) -> None:
        """Raise `RuntimeError` if the engine is closed: it takes no new requests."""
        if self.closed:
            raise RuntimeError("the engine is closed")

    def make_parent(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> ParentRequest:
        """Return a new request with n > 1. Raises `ValueError` as `make_request` does."""
        self.require_open()
        self._check_params(params)
        text, token_ids = self._tokenize(prompt)
        name, seed = self._check_request_id(request_id), self._seed_of(params)
        parent = ParentRequest(name, text, token_ids, params, seed, self.now())
        for child in parent.indices:
            self._check_request_id(child)
        return parent

    def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> TokensPrompt:
        """Render messages of `{"role": ..., "content": ...}` with the chat template of the model.

        variables: more variables for the template.
        Raises `ValueError` if there is no template, or if the template refuses the messages.
        """
        if not (self.tokenizer.chat_template or variables.get("chat_template")):
            raise ValueError(
                "messages: this model's tokenizer has no chat template; use generate()"
            )
        self.check_messages(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program that comes with the model
            raise ValueError(
                f"messages: the chat template of this model refuses them: {str(error)[:300]}"
            ) from error
        assert isinstance(text, str)
        if not text:
            raise ValueError("messages: the chat template of this model returns no text for them")
        # The text already contains the special tokens: the template writes them.
        return TokensPrompt(self._encode("messages", text, add_special_tokens=False), text)

    def check_messages(self, messages: Any) -> None:
        """Raise `ValueError` unless `messages` is one conversation: a list of messages."""
        require_list("messages", messages, "messages")
        if not messages:
            raise ValueError("messages must not be empty")
        for one in messages:
            if not isinstance(one, dict) or not {"role", "content"} <= one.keys():
                raise ValueError(f"messages must be dicts with role and content, got {shown(one)}")
            require_text("messages: role", one["role"])
            self.check_content(one["content"])

    def check_content(self, content: Any) -> None:
        """Raise `ValueError` unless this can be the content of a message."""
        if not isinstance(content, str):
            raise ValueError(f"messages: content must be a string, got {shown(content)}")

    def _seed_of(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(63) if params.seed is None else params.seed

    def _tokenize(self, prompt: Prompt, num_outputs: int = 1) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("prompt must not be empty")
            return prompt, self._encode("prompt", prompt)
        if isinstance(prompt, dict):
            raise ValueError(f"prompt: {NO_IMAGES}")
        token_ids, text = prompt[:2] if isinstance(prompt, TokensPrompt) else (prompt, None)
        if text is not None:
            require_text("prompt", text)
        require_list("prompt", token_ids, "token ids, or a string")
        self._check_num_tokens(size_of(token_ids), num_outputs)
        return text, [as_token_id(token) for token in token_ids]

    def _encode(self, field: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self._check_length(field, len(text))
        require_unicode(field, text)
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # the vocabulary may lack a character and an unknown token
            raise ValueError(
                f"{field}: this model's tokenizer cannot encode {shown(text)}: {str(error)[:300]}"
            ) from error

    def _check_length(self, field: str, num_characters: int) -> None:
        """Refuse text that is too long, without tokenizing it: that would take seconds."""
        if num_characters <= TOKENIZED_CHARACTERS:
            return
        most = max(TOKENIZED_CHARACTERS, self.max_model_len * longest_token(self.tokenizer))
        if num_characters > most:
            raise ValueError(
                f"{field} must have at most {most} characters: no longer text fits into "
                f"max_model_len={self.max_model_len} tokens, got {num_characters}"
            )

    def _check_tokens(self, token_ids: list[int], num_outputs: int = 1) -> None:
        if not token_ids:
            raise ValueError("prompt must not be empty: it has no tokens")
        self._check_num_tokens(len(token_ids), num_outputs)
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f"prompt holds token id {shown(token_id)}, outside the vocabulary "
                    f"[0, {self.vocab_size})"
                )

    def _check_num_tokens(self, num_tokens: int, num_outputs: int) -> None:
        if num_tokens + num_outputs > self.max_model_len:
            more = "; with one output token that is more than" if num_outputs else ", more than"
            raise ValueError(
                f"prompt has {num_tokens} tokens{more} max_model_len={self.max_model_len}"
            )

    def _check_params(self, params: SamplingParams | None) -> SamplingParams:
        if params is None:
            return SamplingParams()
        if isinstance(params, PoolingParams):
            raise ValueError(f"params: {NO_POOLING}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {shown(params)}")
        params.require_in_vocabulary(self.vocab_size)
        if params.prompt_logprobs is not None and self.no_prompt_logprobs is not None:
            raise ValueError(f"prompt_logprobs: {self.no_prompt_logprobs}")
        if params.structured_outputs is not None and self.no_structured_outputs is not None:
            raise ValueError(f"structured_outputs: {self.no_structured_outputs}")
        return params

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end the output."""
        end = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return end.union(params.stop_token_ids) if params.stop_token_ids else end

    def _end_token_ids(self, params: SamplingParams) -> np.ndarray | None:
        """Return the tokens that must not be chosen before the output has `min_tokens` tokens."""
        if params.min_tokens == 0:
            return None
        token_ids = self.eos_token_ids.union(params.stop_token_ids)
        if len(token_ids) >= self.vocab_size:
            raise ValueError(
                f"min_tokens={params.min_tokens} needs a token that does not end the output, but "
                f"stop_token_ids has all {self.vocab_size} tokens of the vocabulary"
            )
        return np.array(sorted(token_ids), np.int64)

    def _check_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if not self.is_in_use(name))
        require_text("request_id", request_id, longest=LONGEST_ID)
        if self.is_in_use(request_id):
            raise ValueError(f"request_id {request_id!r} belongs to a request not yet finished")
        return request_id


@functools.lru_cache(maxsize=8)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of characters of the longest token in the vocabulary."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def as_token_id(token: Any) -> int:
    """Return a token id as an `int`. Raises `ValueError` for anything else."""
    if not isinstance(token, bool):
        try:
            return operator.index(token)
        except Exception:  # arrays and tensors raise exceptions of various classes
            pass
    raise ValueError(f"prompt must hold token ids, got {shown(token)}")
