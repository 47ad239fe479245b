"""What a process must know of its C libraries to compute a model on a CPU. Elsewhere: nothing.

Both are measured facts of Linux's usual ones, GNU's OpenMP and glibc's malloc.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from pathlib import Path

PAUSE_HARD = 2  # omp_pause_hard: the threads go; they are made again when they are needed
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt
KEPT_BYTES = 1 << 30
LARGEST_IN_HEAP = 32 << 20  # glibc's own upper limit


def release_threads() -> None:
    """Give back the OpenMP threads of the thread that calls, if it has any. Takes 0.3 us.

    Each thread that computes has a pool of its own. When all pools together are more than the
    cores, their threads sleep between two parallel loops instead of spinning for a moment, and the
    small matrix products of a decode step take half as long again. So who only plans keeps none.
    """
    if (pause := _pause_function()) is not None:
        pause(PAUSE_HARD)


@functools.cache
def keep_freed_memory() -> None:
    """Let malloc keep what is freed, up to a gigabyte, for the next forward.

    Else the activations of a layer go back to the system, and come back page by page, zeroed, in
    the next: some 5 % of a prefill, more on a thread that is not the first.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, LARGEST_IN_HEAP)


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """OpenMP's own, of the library that torch has loaded; None where that is not GNU's."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        path = next(line.split()[-1] for line in maps.splitlines() if "libgomp" in line)
        pause: Callable[[int], int] = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, StopIteration, AttributeError):
        return None
    return pause
