"""The reports of `compile_kernels`. The workers of a run of the tests share them."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from filelock import FileLock

from tests.helpers.process import run_python


def compile_report(module: str, folders: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the report on all kernels of a module, compiled for every GPU.

    It comes from a process without the interpreter, which takes a minute.
    """
    folder = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    file = folder / f"{module}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            text = run_python("-m", "tests.helpers.compile_kernels", module, TRITON_INTERPRET=None)
            file.write_text(text, encoding="utf-8")
    report: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return report
