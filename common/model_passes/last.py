"""The last layer, behind its attention, for the tokens whose logits are wanted.

Each token of a prompt needs keys and values in all layers, since those behind it look at them. What
the last layer makes of a token besides serves its own logits only, and an engine asks for the
logits of one token of a prompt. So a prefill can do without most of a layer's products.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .layer import joined_layers
from .replace import same


def trim_last_layer(model: PreTrainedModel) -> int:
    """Tell the last of the joined layers which tokens' logits are wanted; how many heed it."""
    layers = joined_layers(model)
    if not layers or layers[-1].may_trim:
        return 0
    try:
        theirs = _some_logits(model)
    except Exception:  # it cannot be asked for some logits only
        return 0
    largest = theirs.abs().max()
    hook = model.register_forward_pre_hook(_name_tokens, with_kwargs=True)
    layers[-1].may_trim = True
    try:  # a model may not pass on what it is given, or do more with what its layers return
        if same(_some_logits(model) / largest, theirs / largest):
            return 1
    except Exception:
        pass
    hook.remove()
    layers[-1].may_trim = False
    return 0


def _some_logits(model: PreTrainedModel) -> torch.Tensor:
    """Of tokens within a prompt, and of its last: [1, 3, V]."""
    prompt = torch.arange(1, 7, device=model.device)[None]
    wanted: tuple[int | torch.Tensor, ...] = prompt[0, [0, 3]], 1
    answers = (
        model(input_ids=prompt, use_cache=False, logits_to_keep=tokens).logits for tokens in wanted
    )
    return torch.cat(list(answers), dim=1)


def _name_tokens(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before a forward: what would be left out behind the layers is left out in the last one."""
    kept, input_ids = kwargs.get("logits_to_keep", 0), kwargs.get("input_ids")
    if input_ids is None or kwargs.get("output_hidden_states"):
        return None
    tokens = slice(-kept, None) if isinstance(kept, int) else kept  # as Hugging Face reads it
    prompt = range(input_ids.shape[1])
    if len(prompt[tokens] if isinstance(tokens, slice) else tokens) == len(prompt):
        return None
    return args, {**kwargs, "logits_to_keep": 0, "tokens_to_keep": tokens}
