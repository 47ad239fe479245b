"""The first operation that differs between two runs of the same request.

A recording has the output and the input of each module of the model, for each token of a request.
A token depends on the tokens before it, and an operation on those before it. So the first
difference is that of the earliest position, and there that of the earliest operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from .engine import LLMEngine

Note = Callable[[str, torch.Tensor], None]


class Difference(NamedTuple):
    """Where two runs differ for the first time, and by how much at most."""

    position: int
    operation: str
    largest: float


@dataclass
class Recording:
    """The numbers of one request: `rows[position][operation]`, in the order of computation."""

    rows: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def note(self, operation: str, tensor: torch.Tensor, positions: dict[int, int]) -> None:
        """Keep the rows of the request. tensor: [1, T, ...]. positions: of each of its rows in T.

        A position that is computed again, after a retraction, keeps its first rows.
        """
        for row, position in positions.items():
            at = self.rows.setdefault(position, {})
            at.setdefault(operation, tensor[0, row].clone())


@contextmanager
def hooked(model: nn.Module, note: Note) -> Iterator[None]:
    """Return a context in which `note` gets the inputs and outputs of all modules without parts.

    The names are those of the modules, such as `model.layers.3.mlp.up_proj`, and ` (input)` after
    them for inputs. Between the output of one module and the input of the next one lie operations
    that are no modules, such as the attention and the additions to the residual stream.
    """
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if next(module.children(), None) is not None:
                continue

            def before(_: Any, args: Any, name: str = name) -> None:
                if args and args[0].ndim > 1:
                    note(f"{name} (input)", args[0])

            def after(_: Any, args: Any, output: Any, name: str = name) -> None:
                if isinstance(output, torch.Tensor):
                    note(name, output)

            hooks.enter_context(_removed(module.register_forward_pre_hook(before)))
            hooks.enter_context(_removed(module.register_forward_hook(after)))
        yield


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def first_difference(a: Recording, b: Recording) -> Difference | None:
    """Return where two recordings differ for the first time, or None.

    Only positions and operations that both have are compared.
    """
    for position in sorted(a.rows.keys() & b.rows.keys()):
        for operation, row in a.rows[position].items():
            other = b.rows[position].get(operation)
            if other is not None and not torch.equal(row, other):
                return Difference(position, operation, float((row - other).abs().max()))
    return None


@contextmanager
def recording(engine: LLMEngine, request_id: str) -> Iterator[Recording]:
    """Return a context in which the numbers of one request are recorded.

    The engine has `enable_overlap=False`, so that the model computes a step before the next one is
    prepared.
    """
    runner, found = engine.core.runner, Recording()
    tokens: dict[int, int] = {}  # the rows of the request in the step, each with its position
    sampled: dict[int, int] = {}  # the same for the rows of the logits
    prepare = runner.prepare

    def noted(batch: Any) -> Any:
        tokens.clear()
        sampled.clear()
        first = 0
        for index, (request, count) in enumerate(batch.tokens_per_request()):
            if request.request_id == request_id:
                start = request.num_computed_tokens
                tokens.update({first + i: start + i for i in range(count)})
                if index in batch.sampled_indices:
                    sampled[batch.sampled_indices.index(index)] = start + count - 1
            first += count
        tokens[-1] = first  # T: the rows of the step
        return prepare(batch)

    def note(operation: str, tensor: torch.Tensor) -> None:
        rows = {row: position for row, position in tokens.items() if row >= 0}
        found.note(operation, tensor, rows if tensor.shape[1] == tokens[-1] else sampled)

    runner.prepare = noted  # type: ignore[method-assign]
    try:
        with hooked(engine.loaded.model, note):
            yield found
    finally:
        del runner.prepare
