"""Fingerprints of the code that a recorded run was made from. Figures of other code are stale.

A fingerprint covers the syntax trees without docstrings. So comments, docstrings and layout may
change, and the code itself may not.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from milestones.chain import own_name, sources

ROOT = Path(__file__).resolve().parent.parent

# The files that decide the steps of a run. Speed and the computation of attention do not matter.
DECIDING = (
    "engine.py", "scheduler.py", "kv_cache.py", "radix_cache.py", "policy.py", "in_flight.py",
    "placeholders.py", "future_map.py", "schedule_batch.py", "admission.py",
)  # fmt: skip
RECORDER = ("slides/workloads.py",)


def sources_of(*milestones: str) -> list[str]:
    """Return the files that recorded runs of these engines depend on, relative to the root.

    An elective has its own version of some files, and takes the others from the milestone below.
    """
    files = [sources(milestone, ROOT) for milestone in milestones]
    paths = [path.relative_to(ROOT).as_posix() for have in files for decides in DECIDING
             for name, path in have.items() if own_name(name) == decides]  # fmt: skip
    return [*dict.fromkeys(paths), *RECORDER]


def fingerprint(paths: Iterable[str]) -> str:
    """Return a text that changes when the code in one of the files changes, or a file is gone."""
    digest = hashlib.sha256()
    for path in paths:
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8") if file.exists() else "", path)
        digest.update("\0".join([path, *_words(tree)]).encode())
    return digest.hexdigest()[:16]


def _words(node: ast.AST) -> Iterator[str]:
    """Yield a syntax tree as words. Empty fields are left out, because versions of Python differ
    in which empty fields a node has."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                if not _is_docstring(item):
                    yield from (name, *_words(item))
            elif item is not None and name not in ("kind", "type_comment"):
                yield f"{name}={item!r}"


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
