"""Compile the C files of this folder for this very CPU, once, and load them.

Triton compiles kernels for a GPU when they are first called; here it is this machine's C compiler
that does it, in a few seconds. The library is kept in the cache folder, under a name that changes
with the sources, the compiler and the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..embedded import cache_folder

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# The loops' threads are those of the OpenMP that torch has loaded: we compile for it and do not
# link another one, whose threads would compete for the same cores.
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off", "-fopenmp", "-fPIC", "-Wno-psabi"]
FAILURES = (OSError, ValueError, RuntimeError, subprocess.SubprocessError)
logger = logging.getLogger(__name__)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler, or none that can do it."""
    for compiler in compilers():
        try:
            path = cache_folder() / f"cpu_kernels-{_fingerprint(compiler)}.so"
            if path.exists():
                try:
                    return ctypes.CDLL(str(path))
                except OSError:  # not whole, or another system's, in a folder that both see
                    logger.info("%s cannot be loaded and is compiled again", path)
            compile_library(compiler, path)
            return ctypes.CDLL(str(path))
        except FAILURES as error:
            said = getattr(error, "stderr", None) or str(error)
            logger.info("%s does not compile the CPU kernels: %s", shlex.join(compiler), said)
    return None


def compilers() -> list[list[str]]:
    """`$CC`, or what machines call their C compilers: those there are, with their arguments."""
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    try:
        commands = [shlex.split(name) for name in names]
    except ValueError:  # an open quote
        return []
    return [command for command in commands if command and shutil.which(command[0])]


def compile_library(compiler: list[str], path: Path) -> None:
    """Write the library to `path`, whole or not at all: several processes may do it at once.

    Raises `OSError` or `subprocess.SubprocessError` where that fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = [str(source) for source in sorted(HERE.glob("*.c"))]
        for command in (
            [*compiler, *FLAGS, "-c", *sources],
            [*compiler, "-shared", "-o", path.name, *(f"{Path(s).stem}.o" for s in sources)],
        ):
            subprocess.run(
                command, cwd=folder, check=True, capture_output=True, text=True, timeout=120
            )
        os.replace(Path(folder, path.name), path)


def _fingerprint(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True)
    parts = [version.stdout, shlex.join(compiler + FLAGS).encode(), _cpu()]
    parts += [source.read_bytes() for source in sorted(HERE.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    """What a program compiled for this CPU may use: a home folder may be seen by several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = [platform.processor().encode()]
    kinds = (b"model name", b"flags", b"Features", b"CPU part")
    return platform.machine().encode() + b"".join(
        sorted({line for line in lines if line.startswith(kinds)})
    )
