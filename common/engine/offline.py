"""`OfflineEngine`: `generate`, `chat` and `stream` on top of `add_request` and `step`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..outputs import RequestOutput
from ..pooling import PoolingParams, PoolingRequestOutput
from ..prompts import Message, Prompt, TokensPrompt
from ..sampling.params import SamplingParams
from ..validation import require_choice, require_list, shown, size_of
from .base import EngineBase
from .interrupts import interrupts_held

T = TypeVar("T")


class OfflineEngine(EngineBase):
    """The blocking calls of all engines.

    They may be used together with `add_request` and `step`. The outputs of other requests are kept,
    and the next call of `step` returns them.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Run prompts until all have finished. Return the final outputs in prompt order.

        params: one `SamplingParams` for all prompts, or a list with one for each prompt.
        progress: whether to show a progress bar. None: only on a terminal.

        If one prompt is refused (`ValueError`), no request of the others stays in the engine.
        """
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        if isinstance(params, PoolingParams):
            raise ValueError(
                "params must be SamplingParams; embed() of the elective embedding has PoolingParams"
            )
        return self._add_and_run(batch, _one_for_each(params, len(batch), SamplingParams), progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return a vector for each prompt, in prompt order: `outputs.data` of each output.

        Only the elective `embedding` can do it. Other engines raise `ValueError`. The arguments are
        those of `generate`.
        """
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = _one_for_each(pooling_params, len(batch), PoolingParams, "pooling_params")
        return self._add_and_run(batch, params, progress)

    def _add_and_run(self, batch: list[Any], params: list[Any], progress: bool | None) -> list[Any]:
        """Add the prompts of a batch, all or none, and run them until all have finished."""
        require_choice("progress", progress, (None, True, False))
        ids: list[str] = []
        try:
            for prompt, prompt_params in zip(batch, params, strict=True):
                ids.append(self.add_request(prompt, prompt_params))
                interrupts_held().deliver()
            return self._run(ids, progress)
        except BaseException:  # a refused prompt, a failed step, Ctrl-C: no request may stay
            self.discard(ids)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template."""
        require_list("messages", messages, "messages, or of lists of messages")
        if not messages:
            raise ValueError("messages must not be empty")
        conversations: Any = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self.input_processor.apply_chat_template(c) for c in conversations]
        return self.generate(prompts, params, progress=progress)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Queue a prompt, then yield its cumulative output after each step that computes it.

        If the iterator is closed or dropped before the end, the request is aborted.
        """
        outputs = self._follow(self.add_request(prompt, params))
        next(outputs)  # from here on, the `finally` clause runs when the generator is dropped
        return outputs  # type: ignore[return-value]  # only the first item was None

    def _follow(self, request_id: str) -> Generator[RequestOutput | None, None, None]:
        finished = False
        try:
            yield None
            while not finished and self.output_processor.is_in_use(request_id):
                for output in self._step_for({request_id}):
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self.abandon(request_id)

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
        """Run one step; return the outputs of these requests. The next step returns the others."""
        with interrupts_held():
            outputs = self.step()
            self.output_processor.put_back(o for o in outputs if o.request_id not in ids)
        return [o for o in outputs if o.request_id in ids]


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, TokensPrompt)):
        return True
    require_list("prompts", prompts, "prompts or token ids, or a string")
    return bool(prompts) and hasattr(prompts[0], "__index__")


def _one_for_each(params: Any, num_prompts: int, kind: type[T], name: str = "params") -> list[T]:
    """Return `params` as a list with one entry for each prompt.

    kind: the class of the entries. Raises `ValueError` for an entry of another class, and for a
    list with another number of entries.
    """
    if params is None or isinstance(params, kind):
        return [kind() if params is None else params] * num_prompts
    title = kind.__name__
    require_list(name, params, f"{title}, or {title}")
    if size_of(params) != num_prompts:
        raise ValueError(f"{name} has {size_of(params)} entries for {num_prompts} prompts")
    entries = list(params)
    for entry in entries:
        if entry is not None and not isinstance(entry, kind):
            raise ValueError(f"{name} must be {kind.__name__}, got {shown(entry)}")
    return entries


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
