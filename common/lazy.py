"""Names that a package imports when they are first used (PEP 562).

Configuration, requests, schedulers and caches are plain Python data. With `lazy_exports`, importing
them imports no model: neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package. modules: the relative module of each lazy name."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return get
