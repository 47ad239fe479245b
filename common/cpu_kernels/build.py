"""Compile the C files of this folder for this very CPU, once, and load them.

Triton compiles kernels for a GPU when they are first called; here it is this machine's C compiler
that does it, in about a second. The library is kept in the cache folder, under a name that changes
with the sources, the compiler and the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ..embedded import cache_folder

HERE = Path(__file__).parent
# The loops' threads are those of the OpenMP that torch has loaded: we compile for it and do not
# link another one, whose threads would compete for the same cores.
FLAGS = ["-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fopenmp", "-fPIC"]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no compiler, or one that cannot do it."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        path = cache_folder() / f"cpu_kernels-{_fingerprint(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiler() -> list[str] | None:
    """`$CC`, or what this machine calls its C compiler: the command and its arguments."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    commands = [shlex.split(name) for name in names]
    return next((command for command in commands if shutil.which(command[0])), None)


def _compile(compiler: list[str], path: Path) -> None:
    """Write the library to `path`, whole or not at all: several processes may do it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = [str(source) for source in sorted(HERE.glob("*.c"))]
        for command in (
            [*compiler, *FLAGS, "-c", *sources],
            [*compiler, "-shared", "-o", path.name, *(f"{Path(s).stem}.o" for s in sources)],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
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
