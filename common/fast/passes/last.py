"""Compute the part of the last layer after its attention only for tokens that need logits.

Each token of a prompt needs keys and values in all layers, because later tokens attend to them. All
else that the last layer computes for a token is used only for the logits of that token. An engine
needs the logits of only one token of a prompt. So a prefill can skip most products of this layer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .layer import joined_layers
from .replace import same


def trim_last_layer(model: PreTrainedModel) -> int:
    """Let the last joined layer skip tokens without logits. Return the number of layers changed."""
    layers = joined_layers(model)
    if not layers or layers[-1].may_trim or model.device.type != "cpu":
        return 0
    try:
        theirs = _some_logits(model)
    except Exception:  # the model cannot compute logits of some tokens only
        return 0
    largest = theirs.abs().max()
    hook = model.register_forward_pre_hook(_name_tokens, with_kwargs=True)
    layers[-1].may_trim = True
    try:  # a model may drop the argument, or use the output of its layers for more than logits
        if same(_some_logits(model) / largest, theirs / largest):
            return 1
    except Exception:
        pass
    hook.remove()
    layers[-1].may_trim = False
    return 0


def _some_logits(model: PreTrainedModel) -> torch.Tensor:
    """Return logits of two tokens within a prompt, and of its last token: [1, 3, V]."""
    prompt = torch.arange(1, 7, device=model.device)[None]
    wanted: tuple[int | torch.Tensor, ...] = prompt[0, [0, 3]], 1
    answers = (
        model(input_ids=prompt, use_cache=False, logits_to_keep=tokens).logits for tokens in wanted
    )
    return torch.cat(list(answers), dim=1)


def _name_tokens(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Replace `logits_to_keep` by `tokens_to_keep` before a forward.

    The last layer then drops the tokens that the model would drop after the layers.
    """
    kept, input_ids = kwargs.get("logits_to_keep", 0), kwargs.get("input_ids")
    if input_ids is None or kwargs.get("output_hidden_states"):
        return None
    tokens = slice(-kept, None) if isinstance(kept, int) else kept  # as Hugging Face reads it
    prompt = range(input_ids.shape[1])
    if len(prompt[tokens] if isinstance(tokens, slice) else tokens) == len(prompt):
        return None
    return args, {**kwargs, "logits_to_keep": 0, "tokens_to_keep": tokens}
