"""Compile the C files of this folder for the CPU of this machine, once, and load them.

Triton compiles kernels for a GPU when they are first called. In the same way, the C compiler of
this machine compiles these kernels in a few seconds. The library is kept in the cache folder. Its
name depends on the sources, the compiler and the CPU. The name ends with a hash of the file: a
damaged file is not loaded, and the library is compiled again.
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

from filelock import FileLock

from ...cpu import MARCH
from ...hf.cache import cache_folder

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
LANGUAGE = ["-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
LANGUAGE += ["-pthread", "-fopenmp-simd", "-fPIC", "-Wno-psabi"]
FLAGS = [*LANGUAGE, "-O3", f"-march={MARCH}"]
FAILURES = (OSError, ValueError, RuntimeError, subprocess.SubprocessError)
logger = logging.getLogger(__name__)


@functools.cache
def load_library(*flags: str) -> ctypes.CDLL | None:
    """Return the compiled kernels; None if this machine has no compiler that can compile them.

    flags: more flags for the compiler. Tests compile for other CPUs.
    """
    for compiler in compilers():
        try:
            return _load(compiler, [*FLAGS, *flags])
        except FAILURES as error:
            said = getattr(error, "stderr", None) or str(error)
            logger.info("%s does not compile the CPU kernels: %s", shlex.join(compiler), said)
    return None


def _load(compiler: list[str], flags: list[str]) -> ctypes.CDLL:
    """Return the library from the cache folder. Compile it if there is no undamaged file.

    Several processes may call this at once: one of them compiles, and the others wait for it.
    """
    folder, name = cache_folder(), f"cpu_kernels-{_fingerprint(compiler, flags)}"
    if (kept := _load_kept(folder, name)) is not None:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if (kept := _load_kept(folder, name)) is not None:
            return kept
        if damaged := sorted(folder.glob(f"{name}-*.so")):
            logger.warning("%s is damaged: the CPU kernels are compiled again", damaged[0])
        return ctypes.CDLL(str(compile_library(compiler, flags, folder, name)))


def _load_kept(folder: Path, name: str) -> ctypes.CDLL | None:
    """Return the library from the folder; None if there is no file, or no undamaged file.

    The system kills a process that loads a truncated library, so the content is checked first. A
    damaged file is not removed: another process may just have replaced it by a good one.
    """
    for path in sorted(folder.glob(f"{name}-*.so")):
        try:
            if path.name == _name_of(name, path.read_bytes()):
                return ctypes.CDLL(str(path))
        except OSError as error:  # compiled by another system that shares the folder
            logger.info("%s cannot be loaded: %s", path, error)
    return None


def _name_of(name: str, content: bytes) -> str:
    """Return the file name of a library. Its hash shows whether the file is damaged."""
    return f"{name}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def compilers() -> list[list[str]]:
    """Return the commands of the C compilers that this machine has: `$CC`, or the usual names."""
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    try:
        commands = [shlex.split(name) for name in names]
    except ValueError:  # a quote is not closed
        return []
    return [command for command in commands if command and shutil.which(command[0])]


def compile_library(compiler: list[str], flags: list[str], folder: Path, name: str) -> Path:
    """Compile the library into `folder`; return its path, made of `name` and a hash of the content.

    The file appears whole or not at all. Raises `OSError` or `subprocess.SubprocessError` if it
    fails.
    """
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        sources = [str(source) for source in sorted(HERE.glob("*.c"))]
        for command in (
            [*compiler, *flags, "-c", *sources],
            [*compiler, "-shared", "-o", "library.so", *(f"{Path(s).stem}.o" for s in sources)],
        ):
            subprocess.run(
                command, cwd=partial, check=True, capture_output=True, text=True, timeout=120
            )
        library = Path(partial, "library.so")
        path = folder / _name_of(name, library.read_bytes())
        os.replace(library, path)
    return path


def _fingerprint(compiler: list[str], flags: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=60, check=True)
    parts = [version.stdout, shlex.join(compiler + flags).encode(), _cpu()]
    parts += [source.read_bytes() for source in sorted(HERE.glob("*.[ch]"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> bytes:
    """Return what identifies the kind of this CPU: several kinds may share one home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = [platform.processor().encode()]
    kinds = (b"model name", b"flags", b"Features", b"CPU part")
    return platform.machine().encode() + b"".join(
        sorted({line for line in lines if line.startswith(kinds)})
    )
