"""Settings of C libraries that make a model faster on a CPU under Linux.

They are based on measurements of the usual libraries of Linux (GNU's OpenMP, glibc's malloc) and of
its kernel. On other systems these functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import threading

import torch

LARGE = 1 << 20  # numbers: torch divides operations on so many among its threads
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt
KEPT_BYTES = 1 << 30
LARGEST_IN_HEAP = 32 << 20  # glibc's own upper limit


@functools.cache
def let_waiting_threads_sleep() -> None:
    """Let torch's threads sleep between two of its parallel loops.

    GNU's OpenMP keeps a pool of threads for each thread that computes. After a loop, they spin for
    up to 10 ms, and take the cores from the threads of our kernels, and from other programs. They
    spin for some microseconds only if all pools together have more threads than there are cores. So
    this function starts a second pool, which never does anything.
    """
    if torch.get_num_threads() == 1:
        return
    started = threading.Event()

    def own_a_pool() -> None:
        torch.empty(LARGE).fill_(0)
        started.set()
        threading.Event().wait()

    threading.Thread(target=own_a_pool, name="second pool", daemon=True).start()
    started.wait()


@functools.cache
def keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to one gigabyte, for the next forward.

    Otherwise malloc returns the memory of a layer's activations to the system, and the next layer
    gets it again page by page, filled with zeros. That takes about 5 % of the time of a prefill,
    and more on a thread other than the first.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, LARGEST_IN_HEAP)


def release_freed_memory() -> None:
    """Give back to the system the memory that malloc keeps after it was freed.

    A model is read in float32 and then packed. Without this, the process would still have the
    memory of both forms.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def in_huge_pages(memory: torch.Tensor) -> torch.Tensor:
    """Ask the system to use pages of 2 MB for the memory of a CPU tensor; return the same tensor.

    The tensor must be new: no data has been written to it. The function is meant for weights, which
    are filled once and read in every step. It is not meant for a KV pool. The system clears a huge
    page when it is first touched, which can take milliseconds, and most of a KV pool would be
    cleared long before it is used.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # only Linux has it
    if memory.is_cpu and advice is not None:
        start = memory.data_ptr()
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if (size := start + memory.nbytes - first) > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)  # the system may refuse
    return memory
