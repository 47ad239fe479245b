"""Compile the C files of this folder for the CPU of this machine, once, and load them.

Triton compiles kernels for a GPU when they are first called. Here the C compiler of this machine
compiles, in a few seconds. The library is kept in the cache folder. Its name changes with the
sources, the compiler and the CPU, and it ends with a hash of the file: a damaged file is not
loaded, and the library is compiled again.
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
    """Return the compiled kernels; None if this machine has no compiler that can compile them."""
    for compiler in compilers():
        try:
            name = f"cpu_kernels-{_fingerprint(compiler)}"
            if (kept := _load_kept(name)) is not None:
                return kept
            return ctypes.CDLL(str(compile_library(compiler, cache_folder(), name)))
        except FAILURES as error:
            said = getattr(error, "stderr", None) or str(error)
            logger.info("%s does not compile the CPU kernels: %s", shlex.join(compiler), said)
    return None


def _load_kept(name: str) -> ctypes.CDLL | None:
    """Return the library from the cache folder; None if there is none, or none that is whole.

    The system kills a process that loads a truncated library, so the content is checked first. A
    damaged file is not removed: another process may just have written a whole one in its place.
    """
    files = sorted(cache_folder().glob(f"{name}-*.so"))
    for path in files:
        try:
            if path.name == _name_of(name, path.read_bytes()):
                return ctypes.CDLL(str(path))
        except OSError as error:  # another system's, in a folder that both see
            logger.info("%s cannot be loaded: %s", path, error)
    if files:
        logger.warning("%s is damaged: the CPU kernels are compiled again", files[0])
    return None


def _name_of(name: str, content: bytes) -> str:
    """Return the file name of a library: it tells whether the file is whole."""
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def compilers() -> list[list[str]]:
    """`$CC`, or what machines call their C compilers: those there are, with their arguments."""
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    try:
        commands = [shlex.split(name) for name in names]
    except ValueError:  # an open quote
        return []
    return [command for command in commands if command and shutil.which(command[0])]


def compile_library(compiler: list[str], folder: Path, name: str) -> Path:
    """Compile the library into `folder`, and return its path: `name`, and a hash of the content.

    The file is written whole or not at all: several processes may do this at once. Raises `OSError`
    or `subprocess.SubprocessError` if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        sources = [str(source) for source in sorted(HERE.glob("*.c"))]
        for command in (
            [*compiler, *FLAGS, "-c", *sources],
            [*compiler, "-shared", "-o", "library.so", *(f"{Path(s).stem}.o" for s in sources)],
        ):
            subprocess.run(
                command, cwd=partial, check=True, capture_output=True, text=True, timeout=120
            )
        library = Path(partial, "library.so")
        path = folder / _name_of(name, library.read_bytes())
        os.replace(library, path)
    return path


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
