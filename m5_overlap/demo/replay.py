"""An emulated device: a runner that replays the tokens of a recorded run, and computes no forward.

On a CPU the host and the forwards share the cores, so overlapping them cannot make the engine much
faster. A device of its own is emulated here: the forward thread sleeps for
`EngineConfig.emulated_forward_ms`, and a sleeping thread uses no core. The work of the host is
real: scheduling, input tensors, future tokens, text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from common import EngineConfig, LoadedModel, Request
from common.displays.workload import Workload, WorkloadResult

from ..kv_cache import PageTable
from ..model_input import ModelInput
from ..model_runner import ModelRunner, StepResult
from ..schedule_batch import ScheduleBatch
from .loops import Loop, run_loop

UNRECORDED = 0  # the token of a request that has ended; the engine drops it


class Recording:
    """The output tokens of each prompt, from a greedy run."""

    def __init__(self, workload: Workload, result: WorkloadResult) -> None:
        runs = zip(workload.prompts, result.token_ids, strict=True)
        self.outputs = {tuple(prompt): output for prompt, output in runs}

    def next_token(self, request: Request) -> int:
        """Return the token after those that `request` has, placeholders included."""
        output = self.outputs[tuple(request.token_ids[: request.num_prompt_tokens])]
        index = len(request.token_ids) - request.num_prompt_tokens
        # I1: the step that is in flight when a request ends may compute one more token of it.
        return output[index] if index < len(output) else UNRECORDED

    def check(self, workload: Workload, result: WorkloadResult) -> None:
        """Raise `AssertionError` if a replay gave other tokens than the recorded run."""
        for prompt, output in zip(workload.prompts, result.token_ids, strict=True):
            expected = self.outputs[tuple(prompt)]
            assert output == expected, f"I1: the replay gave {output}, recorded were {expected}"


class ReplayRunner(ModelRunner):
    """A `ModelRunner` with forwards that return recorded tokens instead of running the model."""

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig, vocab_size: int, recording: Recording
    ) -> None:
        self.vocab_size = vocab_size
        self.recording = recording
        self.tokens: deque[list[int]] = deque()  # of the steps in flight, oldest first
        super().__init__(model, config)

    def launch(self, batch: ScheduleBatch, table: PageTable) -> StepResult:
        self.tokens.append([self.recording.next_token(r) for r in batch.sampled_requests])
        return super().launch(batch, table)

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Return logits that are largest at the recorded tokens, [N, V].

        Before the first launch, the base class checks the model: that takes real forwards.
        """
        if not self.tokens:
            return super().forward(inputs)
        tokens = torch.tensor(self.tokens.popleft(), dtype=torch.int64)
        logits = torch.zeros(len(tokens), self.vocab_size)
        return logits.scatter_(1, tokens[:, None], 1.0)


def replay_loop(
    workload: Workload, overlap: bool, recording: Recording, forward_ms: float, loaded: LoadedModel
) -> Loop:
    """Serve the workload on an emulated device. Each forward takes `forward_ms`.

    Raises `AssertionError` if the tokens are not those of the recording.
    """
    config = {**workload.config, "emulated_forward_ms": forward_ms}
    emulated = replace(workload, config=config)
    loop = run_loop(
        emulated, overlap, loaded,
        lambda model, config: ReplayRunner(model, config, loaded.vocab_size, recording),
    )  # fmt: skip
    recording.check(workload, loop.result)
    return loop
