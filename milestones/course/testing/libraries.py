"""The big libraries: their imports take seconds, so they wait for a test that needs them.

A fork of the server ends at its first import of a big library that the server does not have. The
server then imports the library, and forks again. Tests of plain data never wait for one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterable
from types import ModuleType

# What is imported with each of them. The first import of transformers needs torch, too.
BIG = {
    "torch": ("torch",),
    "transformers": (
        "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
        "transformers.generation.utils", "tokenizers", "triton.language",
    ),
}  # fmt: skip
OF_A_TREE = re.compile(r"(m\d_\w+|common|milestones|tests|conftest)(\.|$)")
FIRST_STATUS = 80  # of a fork that needs a library: this number, and its place in `BIG`


class EndAtImport:
    """A finder of modules that ends a fork at its first import of one of these libraries."""

    def __init__(self, absent: Iterable[str]) -> None:
        self.absent = frozenset(absent)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """End the process, or leave the module to the next finder."""
        if name in self.absent:
            os._exit(FIRST_STATUS + [*BIG].index(name))


def needed(status: int, absent: Iterable[str]) -> str | None:
    """Return the library for which a fork has ended, from its exit status, or None."""
    return next((name for name in absent if FIRST_STATUS + [*BIG].index(name) == status), None)


def import_all(modules: Iterable[str]) -> None:
    """Import modules. If one is not installed, only the tests that need it fail."""
    gc.disable()  # an import makes many objects that stay
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    gc.freeze()  # the collections of a fork need not look at these objects
    gc.enable()


def is_plain() -> bool:
    """Return whether the imported modules of a tree use no big library."""
    own = [module for name, module in [*sys.modules.items()] if OF_A_TREE.match(name)]
    return not any(library_of(value) in BIG for module in own for value in vars(module).values())


def library_of(value: object) -> str:
    """Return the library of a module, a class, a function, or of the class of a value."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0]
    module = getattr(value if callable(value) else type(value), "__module__", None)
    return str(module).partition(".")[0]
