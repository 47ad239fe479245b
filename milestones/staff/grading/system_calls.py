"""Forbid system calls by which a process gets around its limits, in it and in its children.

The limits count the memory of processes and the space of files. Refused is what holds memory
elsewhere: files without a name (`memfd_create`), objects of System V, pages in a pipe
(`vmsplice`), shared memory without a file, which stays when no process has it mapped, and new
namespaces, in which a process may mount a file system of any size.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from dataclasses import dataclass

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
# The instructions of the kernel's filters, and where a filter finds a system call.
LOAD, EQUAL, AT_LEAST, HAS_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
CLONE3 = 435
NEW_NAMESPACES = 0x7E020000  # all flags of `clone` for them
SHARED_WITHOUT_FILE = 0x21  # flags of `mmap`: MAP_SHARED and MAP_ANONYMOUS
# io_uring_setup, memfd_secret; open_tree, move_mount, fsopen, fsmount. Equal everywhere.
NEW_CALLS = (425, 447, 428, 429, 430, 432)

Step = tuple[int, int, int, int]  # instruction, steps to skip if true, if false, and its operand


@dataclass(frozen=True)
class Machine:
    """The kernel's number of an architecture, and those of system calls on it.

    `refused`: memfd_create, shmget, semget, msgget, vmsplice, unshare, setns, mount.
    """

    architecture: int
    refused: tuple[int, ...]
    clone: int
    mmap: int


MACHINES = {
    "x86_64": Machine(0xC000003E, (319, 29, 64, 68, 278, 272, 308, 165), clone=56, mmap=9),
    "aarch64": Machine(0xC00000B7, (279, 194, 190, 186, 75, 97, 268, 40), clone=220, mmap=222),
}


def steps_for(machine: Machine) -> list[Step]:
    """Return the filter, as the kernel runs it for each system call."""
    steps: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, machine.architecture), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, REFUSE),  # numbers of another interface
    ]  # fmt: skip
    for call in (*machine.refused, *NEW_CALLS):
        steps += [(EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE)]
    # A filter cannot read the flags of clone3. The C library uses clone if there is no clone3.
    steps += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)]
    steps += [
        (EQUAL, 0, 4, machine.clone), (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 5, machine.mmap), (LOAD, 0, 0, FIRST_ARGUMENT + 3 * 8),
        (AND, 0, 0, SHARED_WITHOUT_FILE), (EQUAL, 0, 1, SHARED_WITHOUT_FILE),
        (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW),
    ]  # fmt: skip
    return [*steps, (RETURN, 0, 0, ALLOW)]


def forbid_hidden_memory() -> None:
    """Set the filter for this process and its children, for good.

    Raises `OSError` if the kernel does not allow it.
    """
    steps = steps_for(MACHINES[platform.machine()])
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot filter system calls")


def can_forbid_hidden_memory() -> bool:
    """Return whether the kernel allows the filter. A child process tries it."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
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
