"""Let several engines share one model: one forward at a time, with the attention of its engine.

Hugging Face reads the attention function of a model from its configuration. A paged engine puts its
own function there during a forward. Engines of other threads may share the model. Therefore every
forward takes the lock of the model: the forwards of the paged engines, and also those that run with
the model's own attention.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()
_classes: dict[type[Any], type[Any]] = {}


class _OneAtATime(nn.Module):
    """A mixin for a model: each call holds the lock of the model."""

    device: torch.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lock_of(self), on_device(self.device):
            return super().__call__(*args, **kwargs)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches its kernels on this GPU, `cuda:1` for example."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def lock_of(model: nn.Module) -> threading.RLock:
    """Return the lock of a model. All engines get the same lock. A thread may take it twice."""
    with _locks_guard:
        if (lock := _locks.get(model)) is None:
            lock = _locks[model] = threading.RLock()
        return lock


def make_shareable(model: nn.Module) -> None:
    """Make each call of a model hold its lock. The class name and the state dict do not change."""
    with _locks_guard:
        original: Any = type(model)
        if issubclass(original, _OneAtATime):
            return
        if original not in _classes:
            _classes[original] = type(original.__name__, (_OneAtATime, original), {})
        model.__class__ = _classes[original]


@contextmanager
def attention_switched(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Make a model use the attention function that is registered as `name`.

    Holds the lock of the model. The model's own attention is restored at the end, also after an
    error or an interrupt.
    """
    with lock_of(model):
        before = model.config._attn_implementation
        try:  # inside `try`, so that an interrupt in the middle of the change is undone
            model.config._attn_implementation = name
            yield
        finally:
            model.config._attn_implementation = before
