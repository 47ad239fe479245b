"""`PromptReader`: text and messages to token ids, in a thread of its own.

Rendering and tokenizing a long prompt takes longer than a step. In the event loop, this would stop
all streams, and in the engine's thread all requests. One thread does it for all calls, so that no
two threads encode with the shared tokenizer.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from common import Prompt, TokensPrompt
from common.text.input_processor import InputProcessor
from common.text.output_text import decoder_of
from common.validation import require_int, require_list

from .image_memory import ImageMemory
from .settings import ServerSettings

T = TypeVar("T")


class PromptReader:
    """Converts prompts for the engine. The first error of a call is raised as `ValueError`."""

    def __init__(
        self,
        inputs: InputProcessor,
        settings: ServerSettings,
        chat_template: str | None = None,
    ) -> None:
        """chat_template: in place of the model's own."""
        self._inputs = inputs
        self.chat_template = chat_template
        self._max_prompt_tokens = settings.max_prompt_tokens
        self._images = ImageMemory(settings.max_image_bytes)
        added = inputs.tokenizer.added_tokens_decoder.values()
        self._special = sorted(str(token.content) for token in added if token.special)
        self._set_here = set_here(inputs.tokenizer)
        self.has_images = getattr(inputs, "placeholder", None) is not None  # of an elective
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def read(self, prompts: Sequence[Prompt], num_outputs: int = 1) -> list[TokensPrompt]:
        """Return prompts with their token ids. num_outputs: see `InputProcessor.tokenize`."""
        found = []
        for prompt in prompts:  # one after the other, so that prompts of other calls come between
            tokens = functools.partial(self._tokens, prompt, num_outputs)
            found.append(self._checked(await self._run(tokens)))
        return found

    async def read_chat(
        self,
        messages: Sequence[Any],
        variables: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> TokensPrompt:
        """Return the prompt for a conversation, through the model's chat template.

        tools: that the template shows. variables: more variables for the template. Raises
        `ValueError` for a name that Hugging Face or the server sets: a template that a client sends
        would run here.
        """
        if names := self._set_here.intersection(variables or {}):
            raise ValueError(
                f"chat_template_kwargs: {min(names)!r} is not a variable of the template"
            )
        given = variables or {}
        if tools is not None:
            given = {**given, "tools": list(tools)}
        return await self._run(lambda: self._checked(self._chat(messages, given)))

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

    def _chat(self, messages: Sequence[Any], variables: dict[str, Any]) -> TokensPrompt:
        """Render messages. A special token in a message would end it and begin another one."""
        self._inputs.check_messages(messages)
        others = {name: value for name, value in variables.items() if name != "tools"}
        parts = {
            "messages": messages,
            "tools": variables.get("tools"),
            "chat_template_kwargs": others,
        }
        for name, given in parts.items():
            texts = list(strings_in(given))
            for special in self._special:
                if any(special in text for text in texts):
                    raise ValueError(
                        f"{name} must not contain the special token {special!r} of this model"
                    )
        if self.chat_template is not None:
            variables = {**variables, "chat_template": self.chat_template}
        return self._inputs.apply_chat_template(messages, **variables)

    def _checked(self, prompt: TokensPrompt) -> TokensPrompt:
        most, size = self._max_prompt_tokens, len(prompt.prompt_token_ids)
        if most is not None and size > most:
            raise ValueError(f"prompt has {size} tokens, more than max_prompt_tokens={most}")
        self._images.check(prompt)
        return prompt

    def _text(self, token_ids: Any) -> str:
        require_list("tokens", token_ids, "token ids", most=self._inputs.max_model_len)
        for token_id in token_ids:
            require_int("tokens", token_id, low=0, high=self._inputs.vocab_size - 1)
        return decoder_of(self._inputs.tokenizer)(list(token_ids))


def set_here(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the variables of a chat template that Hugging Face or the server sets."""
    arguments = signature(tokenizer.apply_chat_template).parameters
    return {*arguments, *tokenizer.special_tokens_map, "messages"}


def strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in a value of JSON, the keys of objects too. It may be nested deeply."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part


def prompts_of(name: str, given: Any) -> list[Any]:
    """Return the prompts of a field: a string, token ids, or a list of strings or of token ids."""
    if isinstance(given, str):
        return [given]
    require_list(name, given, "prompts or token ids, or a string")
    if not given:
        raise ValueError(f"{name} must not be empty")
    return list(given) if isinstance(given[0], (str, list)) else [given]
