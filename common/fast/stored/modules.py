"""Which modules of a model have stored weights, and how these weights become float32 again.

A linear layer or an embedding with a stored weight has no float32 weight. A parameter must be there
all the same: its shape, dtype and device say what the layer is. So the parameter becomes one NaN,
expanded to the shape of the weight. It needs four bytes, and code that multiplies with it gets NaN,
not a plausible number. A tied embedding and head share one stored weight.

LoRA does not touch a stored weight: it adds the product of two small float32 matrices to the output
of the layer. Tensor parallelism divides a weight before it is packed: its outputs in multiples of
the panel, or its inputs in multiples of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .weight import StoredWeight

# A module of another class may use its weight in another way.
KINDS = (nn.Linear, nn.Embedding)


def can_keep(module: nn.Module) -> bool:
    """Return whether the weight of a module may stay as it is stored."""
    return type(module) in KINDS


def keep(module: nn.Module, *stored: StoredWeight) -> None:
    """Give stored weights to a module: its outputs are those of the weights, one after the other.

    The parameter `weight` becomes NaN, in the shape of the weights together.
    """
    shape = sum(weight.out for weight in stored), stored[0].inputs
    nan = torch.full((1, 1), torch.nan).expand(*shape)
    module.weight = nn.Parameter(nan, requires_grad=False)
    module.__dict__["stored"] = stored


def share(module: nn.Module, other: nn.Module) -> None:
    """Give the stored weights of another module to a module that is tied to it."""
    module.weight = other.weight
    module.__dict__["stored"] = stored_of(other)


def stored_of(module: nn.Module) -> Sequence[StoredWeight]:
    """Return the stored weights of a module; none if its weight is an ordinary tensor."""
    stored: Sequence[StoredWeight] = module.__dict__.get("stored", ())
    return stored


def stored_weights(module: nn.Linear, panel_size: int) -> Sequence[StoredWeight]:
    """Return the weights of a linear layer as stored weights, float32 if they are not stored."""
    if not stored_of(module):
        keep(module, StoredWeight.of_floats(module.weight, panel_size))
    return stored_of(module)


def with_stored(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that have stored weights."""
    return (module for module in model.modules() if stored_of(module))


def keep_narrow(model: nn.Module, panel_size: int) -> int:
    """Keep weights in 16 bits if that changes none of their numbers; return how many there are.

    Most checkpoints store bfloat16. Loading one as float32 does not change its numbers, so half of
    their bits are zeros. All other parameters become float32.
    """
    done: dict[int, nn.Module] = {}  # modules with stored weights by their former parameters
    kept = []
    for module in model.modules():
        if not can_keep(module) or stored_of(module):
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if (tied := done.get(id(weight))) is not None:
            share(module, tied)
        elif (narrow := narrow_of(weight.detach())) is not None:
            keep(module, StoredWeight.of_floats(narrow, panel_size))
            done[id(weight)] = module
            kept.append(weight)  # alive until all tied modules are found: an id may be used again
    model.float()
    return len(kept)


def dequantize(model: nn.Module) -> None:
    """Give every module with stored weights an ordinary float32 weight."""
    done: dict[int, nn.Parameter] = {}
    for module in list(with_stored(model)):
        weight = module.weight
        if id(weight) not in done:
            whole = torch.cat([stored.dequantize() for stored in stored_of(module)])
            done[id(weight)] = nn.Parameter(whole, requires_grad=False)
        module.weight = done[id(weight)]
        del module.__dict__["stored"]


def narrow_of(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a weight in 16 bits if that changes no number, else None."""
    if weight.dim() != 2 or weight.device.type != "cpu":
        return None
    if weight.dtype in (torch.bfloat16, torch.float16):
        return weight
    if weight.dtype != torch.float32:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(weight[:1].to(dtype).float(), weight[:1]):  # a row shows most cases
            narrow = weight.to(dtype)
            if torch.equal(narrow.float(), weight):
                return narrow
    return None
