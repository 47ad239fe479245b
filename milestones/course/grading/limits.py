"""The limits of a test, and the memory that its processes use.

The address space is not limited, because importing torch maps three times the memory that it uses.
The private memory of a process is limited by `RLIMIT_DATA`: an allocation beyond it fails in the
process itself. The sum over all processes, with shared memory, is measured from outside. Memory
that no measure shows, because no process has it mapped, is forbidden: files without a name
(`memfd_create`) and segments of System V. Files in `/tmp` and `/dev/shm` have limits of their own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

# The numbers of memfd_create, shmget, io_uring_setup and memfd_secret, and the kernel's name of the
# architecture.
FORBIDDEN = {
    "x86_64": (0xC000003E, (319, 29, 425, 447)),
    "aarch64": (0xC00000B7, (279, 194, 425, 447)),
}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of the kernel's filters


@dataclass(frozen=True)
class Limits:
    """The limits of one test with all its processes."""

    seconds: float = 60.0  # of wall time; the limit of CPU time is somewhat higher
    memory: int = 3 << 30  # bytes of private memory
    file_size: int = 64 << 20  # bytes of each file that it writes
    disk: int = 256 << 20  # bytes of all its files
    processes: int = 64  # including threads


def apply(limits: Limits, *, own_processes: bool) -> None:
    """Limit this process and its children. The number of processes only if counted separately."""
    seconds = int(limits.seconds * 4) + 5
    values = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits.file_size,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 256,
    }
    if sys.platform == "linux":
        values[resource.RLIMIT_DATA] = limits.memory
        if own_processes:
            values[resource.RLIMIT_NPROC] = limits.processes
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def forbid_hidden_memory() -> None:
    """Forbid system calls that hold memory outside all processes, in this process and its children.

    Raises `OSError` if the kernel does not allow the filter.
    """
    architecture, calls = FORBIDDEN[platform.machine()]
    steps = [
        (LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0), (AT_LEAST, len(calls) + 1, 0, 1 << 30),  # numbers of another interface
        *((EQUAL, len(calls) - i, 0, call) for i, call in enumerate(calls)),
        (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot filter system calls")


def can_forbid_hidden_memory() -> bool:
    """Return whether the kernel allows the filter. A child process tries it."""
    if sys.platform != "linux" or platform.machine() not in FORBIDDEN:
        return False
    child = os.fork()
    if not child:
        try:
            ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            forbid_hidden_memory()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def memory_of_all() -> int:
    """Return the bytes of all processes in this namespace, without this one and without files."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        if status.parent.name == str(os.getpid()):
            continue
        try:
            found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status.read_text())
        except OSError:  # the process has ended
            continue
        total += sum(map(int, found)) * 1024
    return total
