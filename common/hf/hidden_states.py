"""Read the hidden states of a forward, and compute the logits of some of its tokens later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from .shared import lock_of


class HiddenStates:
    """The hidden states of all tokens of a forward: what the layers give to the head.

    They are the states after the final norm. The head makes logits of them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.output: ModelOutput | None = None  # of the layers

    @property
    def of_all_tokens(self) -> torch.Tensor:
        """The states of all tokens, [B, T, H]."""
        assert self.output is not None, "the forward has not called its layers"
        states: torch.Tensor = self.output["last_hidden_state"]
        return states

    def logits(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the logits of some tokens, [N, V]. indices: [N] in the B * T tokens.

        The model runs again, with these states in place of its layers. So whatever it does to its
        logits after the head, such as a soft cap, is done here too.
        """
        assert self.output is not None, "the forward has not called its layers"
        layers: Any = self.model.get_decoder()
        output = replaced(self.output, self.of_all_tokens.flatten(0, 1)[indices][None])
        with lock_of(self.model):
            layers.forward = lambda *_, **__: output  # of the instance: it hides that of the class
            try:
                tokens = torch.zeros_like(indices)[None]  # whatever they are, no layer sees them
                logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
            finally:
                del layers.forward
        return logits[0]


@contextmanager
def hidden_states_read(model: PreTrainedModel) -> Iterator[HiddenStates]:
    """Return a context in which a forward also gives its hidden states. Its logits are the same.

    The last layer then computes all tokens. The head still computes only those of `logits_to_keep`.
    Holds the lock of the model, because engines that share the model share its hooks.
    """
    states = HiddenStates(model)
    kept: int | torch.Tensor = 0

    def keep_all(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        nonlocal kept
        kept = kwargs.get("logits_to_keep", 0)
        return args, {**kwargs, "logits_to_keep": 0}  # 0 means all

    def read(_: Any, args: Any, output: ModelOutput) -> ModelOutput:
        states.output = output
        tokens = slice(-kept, None) if isinstance(kept, int) else kept  # as Hugging Face reads it
        return replaced(output, states.of_all_tokens[:, tokens])

    with lock_of(model):
        # First of all hooks: others may replace `logits_to_keep`.
        before = model.register_forward_pre_hook(keep_all, prepend=True, with_kwargs=True)
        after = model.get_decoder().register_forward_hook(read)
        try:
            yield states
        finally:
            before.remove()
            after.remove()


def replaced(output: ModelOutput, states: torch.Tensor) -> ModelOutput:
    """Return the output of layers with other hidden states, [B, N, H]."""
    return type(output)(**{**output, "last_hidden_state": states})
