"""A process and its children shut off from the machine, as far as the kernel lets us.

On Linux with namespaces (as root, or where users may make their own): no network, no processes but
its own, and of the files only the system, Python and the graded tree, all read-only, with a `/tmp`
that lasts as long as the process. Everything it starts dies with it. As root without namespaces the
graded code runs as another user. Elsewhere limits on time, memory, files and processes are what is
left; `Isolation` says which of it holds.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from .root import change_root, libc

LINUX = sys.platform == "linux"
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
FIRST_UID = 1_500_000  # users that no system gives to anybody


@dataclass(frozen=True)
class Isolation:
    """What holds: shut off from the network, from files, from processes; another user."""

    network: bool = False
    files: bool = False
    processes: bool = False
    user: int | None = None

    @property
    def counted(self) -> bool:
        """Whether the kernel counts its processes apart from those of whoever grades."""
        release = tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
        return self.user is not None or (self.processes and release >= (5, 14))

    @property
    def missing(self) -> list[str]:
        """In words, what does not."""
        words = {
            "the network": self.network,
            "other files of this machine, the reference among them if it may read them": self.files,
            "other processes": self.processes or self.user is not None,
        }
        return [word for word, holds in words.items() if not holds]


@dataclass(frozen=True)
class Box:
    """What the shut-off process needs to see: a tree; and what it must not, wherever that lies."""

    tree: Path
    hidden: tuple[Path, ...]
    disk: int  # bytes of its /tmp
    slot: int  # its number among those that run at once
    namespaces: bool = True


def shut_off(box: Box) -> Isolation:
    """Shut this process off; it returns in another one, and this one waits for it and ends."""
    if not LINUX:
        return Isolation()
    user = FIRST_UID + box.slot if os.geteuid() == 0 else None
    unshared = _unshare() if box.namespaces else None
    if not unshared:
        others = [Path(os.__file__), Path(sys.executable), box.tree]
        return Isolation(user=user if all(map(_open_to_others, others)) else None)
    user = user if unshared == "system" else None  # a namespace of its own knows no other users
    _become_first()
    try:
        change_root(box.tree, box.hidden, box.disk)
    except OSError:
        return Isolation(network=True, processes=True, user=user)
    return Isolation(network=True, files=True, processes=True, user=user)


def give_up_rights(user: int | None) -> None:
    """In a child that will run graded code: another user, no capability, none to be had."""
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
    c.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # only this process's own user looks into it
    c.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kill_all(isolation: Isolation, group: int) -> None:
    """Kill what a child has started, and itself: it led the process group `group`."""
    if isolation.processes:
        _kill(-1)  # all in this namespace but its first process, which is this one
    elif isolation.user is not None:
        child = os.fork()
        if not child:  # as that user, who may kill its own processes and no others
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
    """Whether a user that owns nothing could get there: Python may lie in root's own folder."""
    path = path.resolve()
    return all(parent.stat().st_mode & 0o001 for parent in path.parents) and bool(
        path.stat().st_mode & 0o004
    )


def _unshare() -> str | None:
    """Whose namespaces they are now: the system's, a user's own; None where it is not allowed."""
    if os.geteuid() == 0 and libc().unshare(NAMESPACES) == 0:
        return "system"
    trial = os.fork()  # what fails half-way leaves a process that is nobody
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
    """Fork: the child is the first process of the new namespace, and takes all others along."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc().prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # graded code must not look into this process
