"""The compiled kernels in the cache folder: compiled once, and again when the file is damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.fast.cpu_kernels import kernels
from tests.helpers.process import run_python

pytestmark = pytest.mark.cpu

# A stand-in for the C compiler, which takes seconds: it copies a library that is compiled already.
COMPILER = """
import shutil, sys
if "-shared" in sys.argv:
    shutil.copy(LIBRARY, sys.argv[sys.argv.index("-o") + 1])
    with open(LOG, "a") as log:
        log.write("compiled\\n")
"""
# Each load runs in a process of its own. The system keeps a library that a process has loaded, and
# it kills a process that reads a missing part of a library.
PROGRAM = """
import logging, os, sys
from pathlib import Path
from common.fast.cpu_kernels import bind, build

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
folder = Path(os.environ["LLM_LADDER_CACHE"])

def load(processes=1):
    sys.stdout.flush()
    children = [start() for _ in range(processes)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(ends), f"ended with {ends}"

def start():
    if child := os.fork():
        return child
    try:
        assert bind(build.load_library.__wrapped__()).panel_size > 0
        sys.stdout.flush()
        os._exit(0)
    finally:
        os._exit(1)

def damage(case, content):
    print(case)
    (library,) = folder.glob("*.so")
    whole = library.read_bytes()
    (folder / "damaged").write_bytes(content(whole))
    os.replace(folder / "damaged", library)
    return library

def middle(whole, byte):
    half = len(whole) // 2
    return whole[:half] + bytes([whole[half] ^ byte]) + whole[half + 1 :]

load()
load()
damage("truncated", lambda whole: whole[:5000]); load()
damage("half", lambda whole: whole[: len(whole) // 2]); load()
damage("empty", lambda whole: b""); load()
damage("no library", lambda whole: b"half a library"); load()
damage("one bit", lambda whole: middle(whole, 1)); load()
damage("longer", lambda whole: whole + b"more"); load()
print("renamed")
(library,) = folder.glob("*.so")
library.rename(library.with_name(library.name.replace(".so", "0.so")))
load()
print("removed")
for library in folder.glob("*.so"):
    library.unlink()
load()
damage("several at once", lambda whole: whole[: len(whole) // 2])
load(processes=6)
load()
"""


@pytest.mark.thorough("it compiles the kernels")
@pytest.mark.skipif(kernels() is None, reason="no C compiler")
def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    """Of several processes at once, one compiles it. An undamaged library is not compiled again."""
    loaded = kernels()
    assert loaded is not None
    log, compiler, cache = tmp_path / "log", tmp_path / "cc.py", tmp_path / "cache"
    source = COMPILER.replace("LIBRARY", repr(loaded.library._name)).replace("LOG", repr(str(log)))
    compiler.write_text(source)
    printed = run_python(
        "-c", PROGRAM, CC=f"{sys.executable} {compiler}", LLM_LADDER_CACHE=str(cache)
    )
    warnings = [line for line in printed.splitlines() if line.startswith("WARNING")]
    assert all("damaged: the CPU kernels are compiled again" in line for line in warnings)
    assert len(warnings) == 8, printed  # a line for each damaged file
    # The loads with a warning compiled the library, and so did the two loads that found no file.
    assert len(log.read_text().splitlines()) == len(warnings) + 2
