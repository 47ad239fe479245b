"""The notebook for Colab: its cells run here as a script, without the GPU and the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MILESTONES, ROOT

NOTEBOOK = ROOT / "milestones" / "docs" / "colab.ipynb"
HUB_MODEL = "Qwen/Qwen3-0.6B"
# Colab has IPython. Here, what a cell displays goes to a file.
IPYTHON = """
from pathlib import Path
HTML = str
def display(page):
    Path("displayed.html").write_text(page, encoding="utf-8")
"""


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def has_tag(cell: dict[str, Any], *tags: str) -> bool:
    return bool({*tags} & {*cell["metadata"].get("tags", ())})


def test_the_setup_installs_what_the_project_needs() -> None:
    setup, check = cells()[:2]
    assert has_tag(setup, "setup")
    assert check["source"] == ["!python -m milestones gpu-check --quick"]
    commands = [line.strip() for line in setup["source"] if line[0] in "!%"]
    assert commands == [
        "!git clone --depth 1 $REPOSITORY ladder", "%cd ladder",
        "!pip install --quiet -r requirements.txt",
    ]  # fmt: skip
    assert (ROOT / "requirements.txt").exists()


@pytest.mark.thorough("it sets up an environment and runs the real model")
def test_the_cells_run(tmp_path: Path) -> None:
    here = [cell for cell in cells() if not has_tag(cell, "setup", "gpu")]
    script = "\n\n".join("".join(cell["source"]) for cell in here)
    assert HUB_MODEL in script and 'device.type == "cuda", "no GPU' in script
    script = script.replace('device.type == "cuda"', 'device.type == "cpu"')
    (tmp_path / "IPython").mkdir()
    (tmp_path / "IPython" / "__init__.py").touch()
    (tmp_path / "IPython" / "display.py").write_text(IPYTHON, encoding="utf-8")
    (tmp_path / "cells.py").write_text(script.replace(HUB_MODEL, "tiny-qwen3"), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert all(f"{milestone} " in shown for milestone in MILESTONES), shown
    assert "m1.1 is not written yet: Scheduler.schedule" in shown, shown
    page = (tmp_path / "displayed.html").read_text(encoding="utf-8")
    assert page.startswith("<iframe") and "&lt;script" in page
