"""Write one step of each milestone, with all its values, into the handouts.

`python -m milestones.staff.maintain.one_step` runs the three requests A, B and C of the decks
(`slides/workloads.py`) on each engine, and records one step from the outside: the requests, the
batch, the tensors, the sampled tokens and the outputs. `step_table` lays them out as a block of
text between `<!-- one step -->` and `<!-- /one step -->`. The text before the block is written in
the handout by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from common import EngineConfig, LoadedModel, Request, load_model
from slides.workloads import PROMPTS, config_of, params_of

from ...chain import ROOT, course_place, load, short
from ...recording import write_block
from .step_table import LEGEND, Progress, RecordedStep, lines_of

BLOCK = "one step"
# The step of each milestone, as a number of its forward: something of the lesson happens in it.
STEPS = {
    "m1_single": 2,  # A decodes; B and C wait
    "m2_continuous": 2,  # A and B decode; B ends
    "m3_paged": 4,  # A decodes; C computes a chunk, in pages that B had
    "m4_radix": 4,  # A decodes; C begins with cached pages
    "m5_overlap": 3,  # A and B decode tokens that the host does not know
}


class StepRecorder:
    """Wraps the methods of one engine that a step calls, and records the step with a number."""

    def __init__(self, engine: Any, number: int) -> None:
        """number: counts the steps that compute something, from 1."""
        self.engine, self.number = engine, number
        self.scheduler, self.runner = engine.core.scheduler, engine.core.runner
        self.requests: list[Request] = [*self.scheduler.waiting]
        self.step = RecordedStep(
            prompts={r.request_id: str(r.prompt) for r in self.requests},
            num_prompt_tokens={r.request_id: r.num_prompt_tokens for r in self.requests},
        )
        self.num_scheduled = 0
        self.batch: Any = None  # the step's own, as soon as it is scheduled
        self.inputs: Any = None
        self.is_done = False

    def run(self) -> RecordedStep:
        """Call `engine.step()` until the step has been recorded."""
        self._wrap(self.scheduler, "schedule", self._schedule)
        self._wrap(self.scheduler, "update_from_output", self._update)
        with ExitStack() as undo:
            if hasattr(self.runner, "inputs"):
                self._wrap(self.runner.inputs, "prepare", self._prepare)
                self._wrap(self.runner, "forward", self._forward)
            else:
                model = self.runner.model
                undo.callback(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                undo.callback(model.register_forward_hook(self._end).remove)
            while not self.is_done:
                assert self.engine.has_unfinished_requests(), f"there is no step {self.number}"
                outputs = self.engine.step()
        self.step.outputs = {output.request_id: output for output in outputs}
        self.step.progress.append(self._progress())
        return self.step

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        method = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(method, *args, **kwargs))

    def _progress(self) -> dict[str, Progress]:
        return {r.request_id: self._progress_of(r) for r in self.requests}

    def _progress_of(self, request: Request) -> Progress:
        queue = "running" if request in self.scheduler.running else "waiting"
        if request.finish_reason is not None:
            queue = f"ended: {request.finish_reason}"
        tokens = list(request.token_ids)
        return Progress(queue, tokens, request.num_computed_tokens, request.row)

    def _schedule(self, schedule: Callable[[], Any]) -> Any:
        before = self._progress()
        batch = schedule()
        self.num_scheduled += bool(batch.requests)
        if self.num_scheduled == self.number and self.batch is None:
            self.batch, step = batch, self.step
            step.progress += [before, self._progress()]
            step.batch = [request.request_id for request in batch.requests]
            step.num_scheduled_tokens = list(batch.num_scheduled_tokens)
            step.sampled_indices = list(getattr(batch, "sampled_indices", range(len(step.batch))))
        return batch

    def _prepare(self, prepare: Callable[..., Any], batch: Any, *args: Any) -> Any:
        inputs = prepare(batch, *args)
        if batch is self.batch:
            self.inputs = inputs
            self.step.builder = type(inputs).__name__
            self._keep_all(vars(inputs))
            if hasattr(inputs, "metadata"):
                self._keep_all(vars(inputs.metadata))
        return inputs

    def _keep_all(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                self.step.keep(name, value)
            elif type(value) is int:
                self.step.scalars[name] = value

    def _forward(self, forward: Callable[..., Any], inputs: Any) -> Any:
        if inputs is not self.inputs:
            return forward(inputs)
        if hasattr(self.runner, "future_map"):  # the step before has stored its tokens by now
            self.step.keep("resolved", self.runner.future_map.resolve(inputs.input_ids))
        logits = forward(inputs)
        self.step.shapes["logits"] = list(logits.shape)
        return logits

    def _begin(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if self.num_scheduled == self.number:
            self.step.builder = "forward"
            self._keep_all(kwargs)
            self.step.cached = kwargs["past_key_values"].get_seq_length()

    def _end(self, _model: Any, _args: Any, output: Any) -> None:
        if self.num_scheduled == self.number:
            self.step.shapes["logits"] = list(output.logits.shape)

    def _update(self, update: Callable[..., Any], batch: Any, sampled: Any) -> Any:
        if batch is self.batch:
            decode = self.engine.loaded.tokenizer.decode
            self.step.sampled = [(token, decode([token])) for token, _logprobs in sampled]
            self.is_done = True
        return update(batch, sampled)


def record(milestone: str, loaded: LoadedModel) -> RecordedStep:
    """Run the worked example of a milestone up to the step that its handout shows."""
    name = f"{short(milestone)}_example"
    _, config = config_of(name)
    engine = load(milestone).LLMEngine(EngineConfig(**config), loaded)
    with engine:
        for request_id, params in params_of(name).items():
            engine.add_request(PROMPTS[request_id], params, request_id)
        return StepRecorder(engine, STEPS[milestone]).run()


def laid_out(step: RecordedStep) -> list[str]:
    """Return the lines of a handout's block: how to read the table, and the table."""
    return ["", *LEGEND, "", "```text", *lines_of(step), "```", ""]


def main() -> None:
    """Write the blocks into the handouts of all milestones."""
    loaded = load_model(EngineConfig(device="cpu"))
    for milestone in STEPS:
        lines = laid_out(record(milestone, loaded))
        write_block(ROOT / course_place(milestone) / "README.md", BLOCK, lines)


if __name__ == "__main__":
    main()
