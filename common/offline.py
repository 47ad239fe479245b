"""`OfflineCalls`: `generate`, `chat` and `stream` on top of `add_request` and `step`.

They may be interrupted, and a stream may be dropped at any moment: no request may stay behind.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .guard import Caller, Guard, interrupts_held
from .inputs import Message, Prompt, TokensPrompt
from .outputs import RequestOutput
from .sampling.params import SamplingParams
from .text.output_processor import OutputProcessor
from .validation import require_choice, require_list, shown, size_of

if TYPE_CHECKING:
    from rich.progress import Progress

    from .text.input_processor import InputProcessor

T = TypeVar("T")


class OfflineCalls(ABC):
    """The blocking calls of all engines.

    They may be used together with `add_request` and `step`. The outputs of other requests are kept,
    and the next call of `step` returns them.
    """

    caller: Caller
    input_processor: InputProcessor
    output_processor: OutputProcessor

    @abstractmethod
    def guard(self, name: str) -> Guard: ...

    @abstractmethod
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str: ...

    @abstractmethod
    def step(self) -> list[RequestOutput]: ...

    @abstractmethod
    def abort_request(self, request_id: str) -> bool: ...

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
        with self.guard("generate"):
            return self.run_batch(prompts, "params", params, SamplingParams, progress)

    def run_batch(
        self, prompts: Any, field: str, params: Any, kind: type[Any], progress: bool | None
    ) -> list[Any]:
        """Add the prompts of a batch, all or none, and run them until all have finished.

        field: the name of the argument `params`, for errors. kind: the class of its entries.
        """
        batch = _as_batch(prompts)
        each = _one_for_each(field, params, len(batch), kind)
        require_choice("progress", progress, (None, True, False))
        ids: list[str] = []
        try:
            for prompt, prompt_params in zip(batch, each, strict=True):
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
        with self.guard("stream") as call:
            outputs: Any = call.keep(self._follow(self.add_request(prompt, params)))
            next(outputs)  # from here on, the `finally` clause runs when the generator is dropped
            return outputs  # only the first item was None

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

    def settle(self) -> None:
        """Finish the work that an earlier call left.

        If the call was interrupted, keep or undo its result. If streams were dropped during the
        call, abort their requests.
        """
        caller = self.caller
        if caller.undelivered is not None:
            interrupted, caller.undelivered = caller.undelivered, None
            self.settle_interrupted(*interrupted)
        if caller.abandoned:
            abandoned, caller.abandoned = caller.abandoned, []
            self.discard(abandoned)

    def settle_interrupted(self, name: str, returned: Any) -> None:
        """Keep or undo the result of an interrupted call, which its caller did not receive."""
        if name == "step":
            self.output_processor.put_back(returned)
        elif name == "add_request":
            self.discard([returned])
        elif name == "stream":
            returned.close()

    def abandon(self, request_id: str) -> None:
        """Abort a request after its stream was closed or dropped before the end.

        This happens now if possible. During a call, or in another thread, it is left to the
        beginning of the next call.
        """
        is_other_thread = self.caller.thread not in (None, threading.current_thread())
        if self.caller.depth > 0 or is_other_thread:
            self.caller.abandoned.append(request_id)
        else:
            self.discard([request_id])

    def discard(self, request_ids: Sequence[str]) -> None:
        """Abort those of these requests that are live, and drop the outputs of all of them."""
        with interrupts_held():
            for request_id in request_ids:
                if self.caller.killed_by is None:
                    self.abort_request(request_id)
                self.output_processor.forget(request_id)


def _as_batch(prompts: Any) -> list[Any]:
    """Return one prompt, or several, as a list of prompts."""
    if isinstance(prompts, (str, TokensPrompt, dict)):
        return [prompts]
    require_list("prompts", prompts, "prompts or token ids, or a string")
    is_one = bool(prompts) and hasattr(prompts[0], "__index__")
    return [prompts] if is_one else list(prompts)


def _one_for_each(field: str, params: Any, num_prompts: int, kind: type[T]) -> list[T]:
    """Return `params` as a list with one entry for each prompt.

    kind: the class of the entries. Raises `ValueError` for an entry of another class, and for a
    list with another number of entries.
    """
    if params is None or isinstance(params, kind):
        return [kind() if params is None else params] * num_prompts
    title = kind.__name__
    require_list(field, params, f"{title}, or {title}")
    if size_of(params) != num_prompts:
        raise ValueError(f"{field} has {size_of(params)} entries for {num_prompts} prompts")
    entries = list(params)
    for entry in entries:
        if entry is not None and not isinstance(entry, kind):
            raise ValueError(f"{field} must be {kind.__name__}, got {shown(entry)}")
    return entries


def _progress_bar(show: bool) -> Progress:
    from rich.console import Console  # not above: see `lazy`
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not show,
    )
