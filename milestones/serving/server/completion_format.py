"""The bodies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common import CompletionOutput, RequestOutput, SamplingParams, TokensPrompt

from .errors import ApiError
from .formats import LEAST_LOGPROB, Body, Format
from .token_bytes import TokenBytes

MOST_PROMPT_LOGPROBS = 2**18  # of a call

Row = tuple[int, dict[int, float] | None]  # a token, and its log probabilities


@dataclass(frozen=True)
class Echo:
    """The prompts as a part of the answer.

    texts: the prompt of each choice. with_logprobs: its log probabilities are a part of the answer,
    so a stream begins when they are computed. alone: there is nothing else in the answer.
    """

    texts: Sequence[str]
    with_logprobs: bool
    alone: bool


class CompletionFormat(Format):
    """The bodies of `/v1/completions`. echo: None without it."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, model: str, tokens: TokenBytes, num_top: int, echo: Echo | None = None
    ) -> None:
        super().__init__(model, tokens, num_top)
        self.echo = echo
        self.prompts: dict[int, list[Row]] = {}  # by choice: those that are not sent yet
        self.has_begun: set[int] = set()  # first choices of the prompts that are known
        self.offsets: dict[int, int] = {}  # by choice: characters of the tokens before

    def received(self, index: int, output: RequestOutput) -> RequestOutput:
        if self.echo is None:
            return output
        if self.echo.with_logprobs and index not in self.has_begun:
            if (known := output.prompt_logprobs) is None:  # the first output of a prompt has them
                return emptied(output, is_finished=False)
            rows = list(zip(output.prompt_token_ids, known, strict=True))
            choices = range(index, index + len(output.outputs))
            self.prompts |= dict.fromkeys(choices, rows)
            self.has_begun.add(index)
        return emptied(output, is_finished=True) if self.echo.alone else output

    def first_chunk(self, index: int) -> Body | None:
        if self.echo is None or self.echo.with_logprobs:
            return None
        choice = {"index": index, "text": self.echo.texts[index]}
        return self.body(self.chunk_object, [{**choice, "logprobs": None, "finish_reason": None}])

    def choice(self, index: int, delta: CompletionOutput) -> Body:
        found = self.chunk_choice(index, delta)
        if self.echo is not None and not self.echo.with_logprobs:
            found["text"] = self.echo.texts[index] + delta.text
        return found

    def chunk_choice(self, index: int, delta: CompletionOutput) -> Body:
        prompt = self.prompts.pop(index, None)  # it is sent with the first delta
        echoed = "" if prompt is None or self.echo is None else self.echo.texts[index]
        logprobs = None
        if delta.logprobs is not None:
            rows = zip(delta.token_ids, delta.logprobs, strict=True)
            logprobs = self._logprobs(index, [*(prompt or []), *rows])
        return {
            "index": index,
            "text": echoed + delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    @property
    def is_slow(self) -> bool:
        return self.echo is not None and self.echo.with_logprobs

    def _logprobs(self, index: int, rows: Iterable[Row]) -> Body:
        found: dict[str, list[object]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token_id, values in rows:
            offset = self.offsets.get(index, 0)
            self.offsets[index] = offset + len(self.tokens.text(token_id))
            found["tokens"].append(self.tokens.name(token_id))
            found["text_offset"].append(offset)
            if values is None:  # of the first token: nothing is before it
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
            else:
                found["token_logprobs"].append(max(values[token_id], LEAST_LOGPROB))
                found["top_logprobs"].append(
                    {self.tokens.name(top_id): value for top_id, value in self.top(values)}
                )
        return dict(found)


def emptied(output: RequestOutput, *, is_finished: bool) -> RequestOutput:
    """Return an output without new tokens. is_finished: whether its choices may have ended."""
    outputs = [
        replace(
            completion, text="", token_ids=[],
            logprobs=None if completion.logprobs is None else [],
            finish_reason="length" if is_finished and completion.finish_reason else None,
        )
        for completion in output.outputs
    ]  # fmt: skip
    return replace(output, outputs=outputs)


def require_few(prompts: Sequence[TokensPrompt], params: SamplingParams) -> None:
    """Raise `ApiError` if the log probabilities of prompts would be too many numbers."""
    each = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    count = params.n * each * sum(len(prompt.prompt_token_ids) for prompt in prompts)
    if count > MOST_PROMPT_LOGPROBS:
        raise ApiError(
            400, f"echo with logprobs: the answer would have {count} log probabilities of prompts, "
            f"and the limit is {MOST_PROMPT_LOGPROBS}", param="logprobs",
        )  # fmt: skip
