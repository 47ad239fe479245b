"""`PromptReader`: text and messages to token ids, in a thread of its own.

Rendering and tokenizing a long prompt takes longer than a step. In the event loop, this would stop
all streams, and in the engine's thread all requests. One thread does it for all calls, so that no
two threads encode with the shared tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from common import Prompt, TokensPrompt
from common.text.input_processor import InputProcessor, check_messages
from common.text.output_text import decoder_of
from common.validation import require_int, require_list

T = TypeVar("T")


class PromptReader:
    """Converts prompts for the engine. The first error of a call is raised as `ValueError`."""

    def __init__(self, inputs: InputProcessor, max_prompt_tokens: int | None) -> None:
        self._inputs = inputs
        self._max_prompt_tokens = max_prompt_tokens
        added = inputs.tokenizer.added_tokens_decoder.values()
        self._special = sorted(str(token.content) for token in added if token.special)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def read(self, prompts: Sequence[Prompt], num_outputs: int = 1) -> list[TokensPrompt]:
        """Return prompts with their token ids. num_outputs: see `InputProcessor.tokenize`."""
        return await self._run(
            lambda: [self._checked(self._tokens(p, num_outputs)) for p in prompts]
        )

    async def read_chat(self, messages: Sequence[Any]) -> TokensPrompt:
        """Return the prompt for a conversation, through the model's chat template."""
        return await self._run(lambda: self._checked(self._chat(messages)))

    async def decode(self, token_ids: Any) -> str:
        """Return the text of token ids."""
        return await self._run(lambda: self._text(token_ids))

    async def with_text(self, prompts: Sequence[TokensPrompt]) -> list[str]:
        """Return the text of each prompt."""
        return await self._run(
            lambda: [self._text(p.prompt_token_ids) if p.prompt is None else p.prompt
                     for p in prompts]
        )  # fmt: skip

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _tokens(self, prompt: Any, num_outputs: int) -> TokensPrompt:
        if not isinstance(prompt, str):
            require_list("prompt", prompt, "token ids, or a string")
        return self._inputs.tokenize(prompt, num_outputs=num_outputs)

    def _chat(self, messages: Sequence[Any]) -> TokensPrompt:
        """Render messages. A special token in a message would end it and begin another one."""
        check_messages(messages)
        for message in messages:
            for special in self._special:
                if any(special in text for text in message.values()):
                    raise ValueError(
                        f"messages must not contain the special token {special!r} of this model"
                    )
        return self._inputs.apply_chat_template(messages)

    def _checked(self, prompt: TokensPrompt) -> TokensPrompt:
        most, size = self._max_prompt_tokens, len(prompt.prompt_token_ids)
        if most is not None and size > most:
            raise ValueError(f"prompt has {size} tokens, more than max_prompt_tokens={most}")
        return prompt

    def _text(self, token_ids: Any) -> str:
        require_list("tokens", token_ids, "token ids", most=self._inputs.max_model_len)
        for token_id in token_ids:
            require_int("tokens", token_id, low=0, high=self._inputs.vocab_size - 1)
        return decoder_of(self._inputs.tokenizer)(list(token_ids))


def prompts_of(name: str, given: Any) -> list[Any]:
    """Return the prompts of a field: a string, token ids, or a list of strings or of token ids."""
    if isinstance(given, str):
        return [given]
    require_list(name, given, "prompts or token ids, or a string")
    if not given:
        raise ValueError(f"{name} must not be empty")
    return list(given) if isinstance(given[0], (str, list)) else [given]
