"""`OfflineEngine`: `generate`, `chat` and `stream` on top of `add_request` and `step`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import Self

from .config import EngineConfig
from .input_processor import InputProcessor, Message, Prompt, TokensPrompt
from .model_loader import LoadedModel, load_model
from .output_processor import OutputProcessor
from .outputs import EngineStats, RequestOutput
from .sampling_params import SamplingParams
from .validation import require_choice, require_list, size_of


class OfflineEngine(ABC):
    """What all engines share: the model, input and output processing, and the blocking calls.

    `generate`, `chat` and `stream` may be mixed with `add_request` and `step`: outputs of requests
    that a call did not add are kept for whoever calls `step` next. Not safe for use from several
    threads at once.
    """

    def __init__(
        self, config: EngineConfig | None = None, loaded: LoadedModel | None = None
    ) -> None:
        """Load `config.model`, or share a model that is loaded already."""
        config = config or EngineConfig()
        self.loaded = loaded or load_model(config)
        # From here on every limit is a number.
        self.config = replace(config, max_model_len=self.loaded.resolve_max_model_len(config))
        self.output_processor = OutputProcessor(self.loaded.eos_token_ids)
        self.input_processor = InputProcessor(
            self.loaded, self.config, self.output_processor.in_flight
        )

    @abstractmethod
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id. Raises `ValueError` if it cannot be served (I4)."""

    @abstractmethod
    def step(self) -> list[RequestOutput]:
        """One iteration; the outputs of the requests that moved. Without work, it does nothing."""

    @abstractmethod
    def abort_request(self, request_id: str) -> bool:
        """End a request now; True if it was live. Its final output comes from the next `step`."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's counters."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise `AssertionError`, naming the invariant, if the engine's state is broken."""

    def reset_prefix_cache(self) -> int:
        """Forget what is kept of requests that have ended; how many pages are free by that. Most
        rungs keep nothing."""
        return 0

    def has_unfinished_requests(self) -> bool:
        """True until every final output has been returned."""
        return bool(self.output_processor.requests or self.output_processor.outbox)

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
        batch_params = _one_for_each(params, len(batch))
        require_choice("progress", progress, (None, True, False))
        ids: list[str] = []
        try:
            for prompt, prompt_params in zip(batch, batch_params, strict=True):
                ids.append(self.add_request(prompt, prompt_params))
            return self._run(ids, progress)
        except BaseException:  # a refused prompt, a failed forward, Ctrl-C: leave nothing behind
            self._forget(ids)
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
        """Queue a prompt, then yield its cumulative output after each step that moved it.

        Leaving the iteration early aborts the request; one that is never begun leaves it queued.
        """
        return self._follow(self.add_request(prompt, params))

    def close(self) -> None:
        """Abort what is left and refuse what comes. Closing twice is fine."""
        self._forget(list(self.output_processor.requests))
        self.input_processor.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _follow(self, request_id: str) -> Iterator[RequestOutput]:
        finished = False
        try:
            while not finished and self.output_processor.in_flight(request_id):
                for output in self._step_for({request_id}):
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._forget([request_id])

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
        return [final[request_id] for request_id in ids]

    def _step_for(self, ids: set[str]) -> list[RequestOutput]:
        """One step; the outputs of these requests. The others' wait for the next `step`."""
        outputs = self.step()
        self.output_processor.put_back(o for o in outputs if o.request_id not in ids)
        return [o for o in outputs if o.request_id in ids]

    def _forget(self, ids: Sequence[str]) -> None:
        """Abort what is live of these requests; nobody will ask for their outputs."""
        for request_id in ids:
            self.abort_request(request_id)
            self.output_processor.outbox.pop(request_id, None)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, (str, TokensPrompt)):
        return True
    require_list("prompts", prompts, "prompts or token ids, or a string")
    return bool(prompts) and hasattr(prompts[0], "__index__")


def _one_for_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """`params` as a list of as many as there are prompts. Raises `ValueError` for other numbers."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    require_list("params", params, "SamplingParams, or SamplingParams")
    if size_of(params) != num_prompts:
        raise ValueError(f"params has {size_of(params)} entries for {num_prompts} prompts")
    return list(params)


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
