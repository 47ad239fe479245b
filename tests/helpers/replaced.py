"""What tests replace: functions, to plant a mistake or to see the calls; and streams."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from common import LoadedModel


def plant(patch: pytest.MonkeyPatch, target: str, mistake: Callable[..., Any]) -> None:
    """Replace a function, method or property by a mistake.

    target: its full name, with the module and the class.
    mistake: called with the original, and then with the arguments of the call.
    """
    original = resolve_name(target)

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        return mistake(original, *args, **kwargs)

    patch.setattr(target, property(mistaken) if isinstance(original, property) else mistaken)


def fail_forward(
    patch: pytest.MonkeyPatch, loaded: LoadedModel, nth: int, error: type[BaseException]
) -> None:
    """Make the n-th forward from now fail in layer 1, when layer 0 has stored keys and values."""
    calls = iter(range(1, 10**6))

    layer: Any = loaded.model.model.layers[1]
    forward = layer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise error
        return forward(*args, **kwargs)

    patch.setattr(layer, "forward", failing)


def put_on_gpu(engine: Any, stream_module: Any, *names: str) -> None:
    """Give an engine on a CPU the streams that it would have on a GPU. See `FakeCuda`."""
    import torch  # not above: the states of exercises with plain data need this file

    runner = engine.core.runner
    for name in ("stream", *names):
        getattr(runner, name).close()
        setattr(runner, name, stream_module.CudaStream(torch.device("cuda", 0)))
