"""The bodies of answers in OpenAI's two APIs, whole and as the chunks of a stream.

A delta is a `CompletionOutput` with the part that the client does not have yet. In an answer that
is not streamed, it is the whole output.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common import CompletionOutput, RequestOutput
from common.text.output_text import pieces_of

Body = dict[str, Any]
LEAST_LOGPROB = -9999.0  # in place of -inf, which JSON does not have
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte token of a tokenizer that is not byte-level


class TokenBytes:
    """The bytes that each token of a vocabulary stands for.

    A token may be a part of a character. Its bytes are then no valid UTF-8.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = pieces_of(tokenizer) is not None
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        added = tokenizer.added_tokens_decoder.items()
        self._added = {token_id: str(token.content) for token_id, token in added}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self._is_byte_level:
            return bytes(self._byte_of[character] for character in token)
        if found := BYTE.fullmatch(token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes spaces like this

    def text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for a part of a character."""
        return self.of(token_id).decode("utf-8", "replace")

    def name(self, token_id: int) -> str:
        """Return the text of a token; for a part of a character, `bytes:` and its bytes."""
        data = self.of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Format(ABC):
    """The bodies of one API call."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokens: TokenBytes, num_top: int) -> None:
        self.call_id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.tokens = tokens
        self.num_top = num_top  # most likely tokens in the log probabilities
        self.created = int(time.time())

    def whole(self, deltas: Sequence[CompletionOutput], usage: Body) -> Body:
        """Return the body of an answer that is not streamed."""
        choices = [self.choice(index, delta) for index, delta in enumerate(deltas)]
        return {**self._body(self.whole_object, choices), "usage": usage}

    def chunk(self, index: int, delta: CompletionOutput) -> Body:
        """Return a chunk of a stream."""
        return self._body(self.chunk_object, [self.chunk_choice(index, delta)])

    def usage_chunk(self, usage: Body) -> Body:
        """Return the last chunk of a stream, which has no choice."""
        return {**self._body(self.chunk_object, []), "usage": usage}

    def first_chunk(self, index: int) -> Body | None:
        """Return the chunk with which a choice begins, if it has one."""
        return None

    @abstractmethod
    def choice(self, index: int, delta: CompletionOutput) -> Body:
        """Return a choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        """Return a choice of a chunk."""

    def top(self, logprobs: dict[int, float]) -> list[tuple[int, float]]:
        """Return the most likely tokens, the most likely one first."""
        ranked = sorted(logprobs.items(), key=lambda item: -item[1])
        return [(token_id, max(value, LEAST_LOGPROB)) for token_id, value in ranked[: self.num_top]]

    def _body(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class CompletionFormat(Format):
    """The bodies of `/v1/completions`.

    echoed: the text of the prompt of each choice, if it is a part of the answer.
    """

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, model: str, tokens: TokenBytes, num_top: int, echoed: Sequence[str] | None
    ) -> None:
        super().__init__(model, tokens, num_top)
        self.echoed = echoed
        self.offsets: dict[int, int] = {}  # by choice: characters of the tokens before

    def first_chunk(self, index: int) -> Body | None:
        if self.echoed is None:
            return None
        choice = {"index": index, "text": self._echo(index)}
        return self._body(self.chunk_object, [{**choice, "logprobs": None, "finish_reason": None}])

    def _echo(self, index: int) -> str:
        return "" if self.echoed is None else self.echoed[index]

    def choice(self, index: int, delta: CompletionOutput) -> Body:
        return {**self.chunk_choice(index, delta), "text": self._echo(index) + delta.text}

    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, index: int, delta: CompletionOutput) -> Body | None:
        if delta.logprobs is None:
            return None
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + len(self.tokens.text(token_id))
        rows = list(zip(delta.token_ids, delta.logprobs, strict=True))
        return {
            "tokens": [self.tokens.name(token_id) for token_id, _ in rows],
            "token_logprobs": [max(values[token_id], LEAST_LOGPROB) for token_id, values in rows],
            "top_logprobs": [
                {self.tokens.name(top_id): value for top_id, value in self.top(values)}
                for _, values in rows
            ],
            "text_offset": offsets,
        }


class ChatFormat(Format):
    """The bodies of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self, index: int) -> Body | None:
        start = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": start, "logprobs": None, "finish_reason": None}
        return self._body(self.chunk_object, [choice])

    def choice(self, index: int, delta: CompletionOutput) -> Body:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, **self._end(delta)}

    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        content = {"content": delta.text} if delta.text else {}
        return {"index": index, "delta": content, **self._end(delta)}

    def _end(self, delta: CompletionOutput) -> Body:
        if delta.logprobs is None:
            return {"logprobs": None, "finish_reason": delta.finish_reason}
        rows = zip(delta.token_ids, delta.logprobs, strict=True)
        content = [
            {
                **self._entry(token_id, max(values[token_id], LEAST_LOGPROB)),
                "top_logprobs": [self._entry(*pair) for pair in self.top(values)],
            }
            for token_id, values in rows
        ]
        return {"logprobs": {"content": content}, "finish_reason": delta.finish_reason}

    def _entry(self, token_id: int, logprob: float) -> Body:
        data = list(self.tokens.of(token_id))
        return {"token": self.tokens.text(token_id), "logprob": logprob, "bytes": data}


def usage(outputs: Sequence[RequestOutput]) -> Body:
    """Return the token counts of an API call. Each prompt counts once, however many choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
