"""The threads of the kernels in C: they compute each piece of a job once."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter
from textwrap import dedent

import pytest

from common.fast.cpu_kernels import Kernels, kernels
from tests.helpers.process import run_python

PIECE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
COUNTS = [0, 1, 2, 3, 7, 30]


def test_each_piece_is_computed_once(compiled: Kernels) -> None:
    """Three threads call at the same time: one of them has the workers, the others are alone."""
    spread, wrong = compiled.library.spread, list[str]()

    def call(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            threads, count, seen = rng.choice([1, 2, 3, 8]), rng.choice(COUNTS), Counter[int]()
            piece = PIECE(lambda args, index, seen=seen: seen.update([index]))
            spread(threads, ctypes.c_int64(count), piece, None)
            if seen != Counter(range(count)):
                wrong.append(f"{threads} threads, {count} pieces: {sorted(seen.elements())}")

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_more_pieces_than_a_share_can_count(compiled: Kernels) -> None:
    """Long contexts have many parts: with 16 bits for each number, they are several jobs."""
    count, seen = (1 << 16) + 1, list[int]()
    piece = PIECE(lambda args, index: seen.append(index))
    compiled.library.spread(2, ctypes.c_int64(count), piece, None)
    assert sorted(seen) == list(range(count))


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
def test_a_forked_process_starts_its_own_workers() -> None:
    """The workers of its parent do not exist in it, and one may have had a piece.

    The pieces of the parent are C, as in an engine. If threads of C call Python while a process is
    forked, Python itself may hang in the child, because a lock of its list of threads is held.
    """
    script = """
        import ctypes, os, threading
        from common.fast.cpu_kernels import kernels
        PIECE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        seen = []
        def run():
            piece = PIECE(lambda args, index: seen.append(index))
            kernels().library.spread(2, ctypes.c_int64(50), piece, None)
        def keep_busy():
            microseconds, sleep = ctypes.c_void_p(20), ctypes.CDLL(None).usleep
            while True:
                kernels().library.spread(2, ctypes.c_int64(50), sleep, microseconds)
        threading.Thread(target=keep_busy, daemon=True).start()
        run()
        for _ in range(5):
            if (child := os.fork()) == 0:
                seen.clear()
                run()
                os._exit(0 if sorted(seen) == list(range(50)) else 1)
            assert os.waitpid(child, 0)[1] == 0
        print("all children computed", flush=True)
        os._exit(0)
    """
    assert "all children computed" in run_python("-c", dedent(script))
