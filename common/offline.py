"""`OfflineEngine`: `generate`, `chat` and `stream` on top of `add_request` and `step`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .engine_base import EngineBase
from .input_processor import Message, Prompt, TokensPrompt
from .interrupts import interrupts_held
from .outputs import RequestOutput
from .sampling_params import SamplingParams


class OfflineEngine(EngineBase):
    """The blocking calls of all engines.

    They may be mixed with `add_request` and `step`: the outputs of other requests are kept for the
    next call of `step`.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends; final outputs in prompt order.

        `params`: one for all, or one a prompt. `progress`: show a bar; None: on a terminal.
        A prompt that is refused (`ValueError`) leaves none of the others behind.
        """
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if len(params) != len(batch):
            raise ValueError(f"params has {len(params)} entries for {len(batch)} prompts")
        ids: list[str] = []
        try:
            for prompt, prompt_params in zip(batch, params, strict=True):
                ids.append(self.add_request(prompt, prompt_params))
                interrupts_held().deliver()
            return self._run(ids, progress)
        except BaseException:  # a refused prompt, a failed step, Ctrl-C: leave nothing behind
            self.forget(ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        if not messages:
            raise ValueError("messages must not be empty")
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self.input_processor.apply_chat_template(c) for c in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Queue a prompt, then yield its cumulative output after each step that moved it.

        If the iterator is closed or dropped before the end, the request is aborted.
        """
        outputs = self._follow(self.add_request(prompt, params))
        next(outputs)  # from here on, its `finally` clause runs when it is dropped
        return outputs  # type: ignore[return-value]  # None was the first one only

    def _follow(self, request_id: str) -> Generator[RequestOutput | None, None, None]:
        finished = False
        try:
            yield None
            while not finished and self.output_processor.in_flight(request_id):
                for output in self._step_for({request_id}):
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self.forget([request_id])

    def _run(self, ids: list[str], progress: bool | None) -> list[RequestOutput]:
        final: dict[str, RequestOutput] = {}
        show = sys.stderr.isatty() and len(ids) > 1 if progress is None else progress
        with _progress_bar(show) as bar:
            task = bar.add_task("requests", total=len(ids))
            while len(final) < len(ids):
                for output in self._step_for(set(ids)):
                    if output.finished:
                        final[output.request_id] = output
                        bar.advance(task)
                interrupts_held().deliver()
        return [final[request_id] for request_id in ids]

    def _step_for(self, ids: set[str]) -> list[RequestOutput]:
        """Run one step; return the outputs of these requests. The next one returns the others."""
        with interrupts_held():
            outputs = self.step()
            self.output_processor.put_back(o for o in outputs if o.request_id not in ids)
        return [o for o in outputs if o.request_id in ids]


def _is_one_prompt(prompts: Any) -> bool:
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValueError(f"prompts must be a string, token ids or a list of those: {prompts!r}")
    if isinstance(prompts, (str, TokensPrompt)):
        return True
    return len(prompts) > 0 and all(hasattr(token, "__index__") for token in prompts)


def _progress_bar(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )
