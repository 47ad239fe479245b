"""`PromptKeys`: the keys of the prompt of an API call, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..server.protocol import ChatCall, CompletionCall
from .keys import PageKey, page_keys
from .wire import Description

CHARACTERS_PER_TOKEN = 16  # a longer prompt than this times max_model_len is cut before tokenizing


class PromptKeys:
    """Tokenizes prompts as a replica does, to look them up in the index.

    A call that cannot be read has no keys. The replica says what is wrong with it.
    """

    def __init__(self, replica: Description) -> None:
        self._page_size = replica.page_size
        self._max_model_len = replica.max_model_len
        self._tokenizer: Any = pickle.loads(replica.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-keys")

    async def of(self, path: str, body: bytes) -> tuple[PageKey, ...]:
        """Return the keys of the first prompt of a call; nothing if it has none."""
        if self._page_size is None or path not in READERS:
            return ()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._keys, path, body)

    def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _keys(self, path: str, body: bytes) -> tuple[PageKey, ...]:
        assert self._page_size is not None
        try:
            token_ids = READERS[path](self, json.loads(body))
            return tuple(page_keys(token_ids[: self._max_model_len], self._page_size))
        except Exception:  # any input: the replica has the right error for it
            return ()

    def _completion(self, values: Any) -> list[int]:
        prompt = CompletionCall(**values).prompts()[0]
        return prompt if isinstance(prompt, list) else self._encode(prompt, True)

    def _chat(self, values: Any) -> list[int]:
        messages = ChatCall(**values).conversation()
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        most = CHARACTERS_PER_TOKEN * self._max_model_len
        return list(self._tokenizer.encode(text[:most], add_special_tokens=add_special_tokens))


READERS = {
    "/v1/completions": PromptKeys._completion,
    "/v1/chat/completions": PromptKeys._chat,
}
