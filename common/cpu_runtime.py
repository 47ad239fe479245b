"""What a process must know of its C libraries to compute a model on a CPU. Elsewhere: nothing.

All are measured facts of Linux's usual ones, GNU's OpenMP and glibc's malloc, and of its kernel.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
from collections.abc import Callable
from pathlib import Path

import torch

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


def in_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """The same tensor, which nobody has written to yet; on a CPU its memory will come in pages of
    2 MB where the system has them.

    For what is filled at once and read in every step: the weights. The first touch of such a page
    clears it, which can take milliseconds; of a KV pool much would be cleared that is not used yet.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux
    if memory.is_cpu and advice is not None:
        start = memory.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if (size := start + memory.nbytes - first) > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)  # it may refuse
    return memory


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
