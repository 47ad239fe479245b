"""Isolate a process and its children from the machine, as far as the kernel allows it.

On Linux with namespaces (as root, or where users may create them): the process has no network and
sees only its own processes. Of the files it sees only the system and Python, read-only, a copy of
the graded tree, and a `/tmp`; the last two are removed when the process ends. All its children die
with it. As root without namespaces, the graded code runs as another user, or not at all. On other
systems only the limits on time, memory, files and processes remain. `Isolation` says which parts
are in effect.

bubblewrap makes the same namespaces, but for a program that it starts. Here the namespaces are
made by a fork of a process that has imported torch already, which saves ten seconds for each exam.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from .root import change_root, libc
from .system_calls import can_forbid_hidden_memory

LINUX = sys.platform == "linux"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
USERS = range(1 << 24, 1 << 30)  # ids that no system gives to a user


@dataclass(frozen=True)
class Isolation:
    """What the process is isolated from, and its user, if changed.

    `memory`: system calls that hold memory outside all processes are forbidden.
    """

    network: bool = False
    files: bool = False
    processes: bool = False
    memory: bool = False
    user: int | None = None

    @property
    def counted(self) -> bool:
        """Whether the kernel counts these processes separately from those of the grading user."""
        release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
        return self.user is not None or (self.processes and release >= (5, 14))

    @property
    def missing(self) -> list[str]:
        """The parts that are not in effect, in words."""
        words = {
            "the network": self.network,
            "other files of this machine (the reference too, if it is readable)": self.files,
            "other processes": self.processes or self.user is not None,
            "memory that no limit counts": self.memory,
        }
        return [word for word, holds in words.items() if not holds]


@dataclass(frozen=True)
class Box:
    """What the isolated process must see (a tree), and what it must not see (`hidden`)."""

    tree: Path
    hidden: tuple[Path, ...]
    disk: int  # bytes of its /tmp
    user: int  # the id of the user that graded code becomes, if the grader is root


def shut_off(box: Box) -> Isolation:
    """Isolate this process. Returns in a child process; this one waits for it, and ends."""
    if not LINUX:
        return Isolation()
    memory = can_forbid_hidden_memory()
    user = box.user if os.geteuid() == 0 else None
    unshared = _unshare()
    if not unshared:
        if user is not None:
            _require_other_user(box.tree)
        return Isolation(memory=memory, user=user)
    user = user if unshared == "system" else None  # a user's namespace has no other users
    _become_first()
    try:
        change_root(box.tree, box.hidden, box.disk)
    except OSError:
        return Isolation(network=True, processes=True, memory=memory, user=user)
    return Isolation(network=True, files=True, processes=True, memory=memory, user=user)


def new_user() -> int:
    """Return the id of a user that no other exam has, also not one of a grader beside this one.

    The kernel counts processes for each user, so exams with the same id would share one limit.
    """
    return USERS[secrets.randbelow(len(USERS))]


def require_isolation(tree: Path) -> None:
    """Raise `PermissionError` if graded code would have to run as root."""
    if not LINUX or os.geteuid() != 0:
        return
    trial = os.fork()
    if not trial:
        status = 1
        try:
            status = 0 if _unshare() else 1
        finally:
            os._exit(status)
    if os.waitpid(trial, 0)[1]:
        _require_other_user(tree)


def _require_other_user(tree: Path) -> None:
    closed = [
        str(path)
        for path in (Path(os.__file__), Path(sys.executable), tree)
        if not _open_to_others(path)
    ]
    if closed:
        raise PermissionError(
            f"without namespaces, graded code would run as root: another user cannot read "
            f"{closed[0]}; install Python outside root's folder, or grade as another user"
        )


def end_with_parent(alive: int | None = None) -> None:
    """Let the kernel kill this process when its parent ends, or end at once if it has ended.

    `alive` is the reading end of a pipe that only the parent can write to.
    """
    if LINUX:
        libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if alive is not None and select.select([alive], [], [], 0)[0]:
        os._exit(1)


def give_up_rights(user: int | None) -> None:
    """Change to another user and drop all capabilities, before graded code runs."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if not LINUX:
        return
    c = libc()
    c.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        c.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    c.capset(header, (ctypes.c_uint32 * 6)())
    c.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # only processes of the same user can read its memory
    end_with_parent()


def kill_all(isolation: Isolation, group: int) -> None:
    """Kill a child, which leads the process group `group`, and all that it has started."""
    if isolation.processes:
        _kill(-1)  # all processes of this namespace except this one, which is its first
    elif isolation.user is not None:
        child = os.fork()
        if not child:  # as that user, which may only kill its own processes
            os.setresuid(isolation.user, isolation.user, isolation.user)
            _kill(-1)
            os._exit(0)
        os.waitpid(child, 0)
    _kill(-group)


def _kill(target: int) -> None:
    try:
        os.kill(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _open_to_others(path: Path) -> bool:
    """Return whether another user can read a file. Python may be in root's private folder."""
    path = path.resolve()
    return all(parent.stat().st_mode & 0o001 for parent in path.parents) and bool(
        path.stat().st_mode & 0o004
    )


def _unshare() -> str | None:
    """Create new namespaces. Return "system" or "user" for their owner, None if not allowed."""
    if os.geteuid() == 0 and libc().unshare(NAMESPACES) == 0:
        return "system"
    trial = os.fork()  # a failure in the middle would leave this process without a valid user
    if not trial:
        status = 1
        try:
            _unshare_as_user()
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(trial, 0)[1]:
        return None
    _unshare_as_user()
    return "user"


def _unshare_as_user() -> None:
    user, group = os.geteuid(), os.getegid()
    if libc().unshare(NAMESPACES | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become_first() -> None:
    """Fork. The child is the first process of the new namespace; when it ends, all others end."""
    alive, parent = os.pipe()
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.close(parent)
    end_with_parent(alive)
    os.close(alive)
    libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # graded code must not read this process's memory
