"""Several engines on one model: one forward at a time, each with the attention that it needs.

Hugging Face reads the attention function of a model from its configuration. A paged engine puts
its own function there for the time of a forward. Engines of other threads may share the model, so
every forward takes the model's lock: those of the paged engines, and those that run with the
model's own attention.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()
_classes: dict[type[Any], type[Any]] = {}


class _OneAtATime(nn.Module):
    """Mixed into a model: a call holds the model's lock."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lock_of(self):
            return super().__call__(*args, **kwargs)


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of a model, the same one for every engine. A thread may take it twice."""
    with _locks_guard:
        if (lock := _locks.get(model)) is None:
            lock = _locks[model] = threading.RLock()
        return lock


def make_shareable(model: nn.Module) -> None:
    """Let each call of a model hold its lock. The name of its class and its state dict stay."""
    with _locks_guard:
        original: Any = type(model)
        if issubclass(original, _OneAtATime):
            return
        if original not in _classes:
            _classes[original] = type(original.__name__, (_OneAtATime, original), {})
        model.__class__ = _classes[original]


@contextmanager
def attention_switched(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a model use the attention function that is registered as `name`.

    Holds the model's lock. The model's own attention is restored at the end, also after an error
    or an interrupt.
    """
    with lock_of(model):
        before = model.config._attn_implementation
        try:  # the change is inside: an interrupt after half of it is undone too
            model.config._attn_implementation = name
            yield
        finally:
            model.config._attn_implementation = before
