"""Make a root for a process in a mount namespace: the system, Python, a tree and a `/tmp`."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
DEVICES = ("null", "full", "random", "urandom")  # not zero: mapped, it is memory without a limit
TREE = 64 << 20  # bytes of a graded tree, with what graded code writes into it
MOST_FILES = 20_000  # in /tmp: an empty file takes no space, but memory of the kernel
SETTINGS = ("passwd", "group", "ld.so.cache", "localtime", "nsswitch.conf")
MACHINE = ("cpuinfo", "meminfo")


def change_root(tree: Path, hidden: tuple[Path, ...], disk: int) -> None:
    """Make a root with only the needed files, and enter it. Raises `OSError` if not allowed."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = Path(tempfile.mkdtemp(prefix="root", dir=tree.parent))
    _tmpfs(root, 16 << 20, "755")
    for name, size in (("tmp", disk), ("dev/shm", 64 << 20)):
        (root / name).mkdir(parents=True)
        _tmpfs(root / name, size, "1777")
    for path, covers in _layers(hidden):
        if not covers:
            _bind(path, root)
        elif (root / path.relative_to("/")).is_dir():
            _tmpfs(root / path.relative_to("/"), 1 << 20, "755")
    for link in _links():
        _link(link, root)
    for name in DEVICES:
        _bind(Path("/dev", name), root, writable=True)
    (root / "etc").mkdir(exist_ok=True)
    for name in SETTINGS:
        if Path("/etc", name).is_file():
            shutil.copyfile(Path("/etc", name), root / "etc" / name)
    _proc(root)
    (root / "tmp/home").mkdir()
    _copy(tree, root)
    os.chdir(root)
    if libc().pivot_root(b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    libc().umount2(b".", MNT_DETACH)
    os.chdir("/")
    _mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _needed() -> set[Path]:
    """Return the folders of the system and of Python, by the names that Python knows."""
    paths = {Path(path) for path in (*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths |= {Path(sys.executable), Path(sys.executable).resolve().parent.parent}
    paths |= {Path(path) for path in sys.path if "site-packages" in path or "python" in path}
    return {path for path in paths if path.exists() and path != Path("/")}


def _kept() -> set[Path]:
    """Return the real places of what is needed. A link has another place than its target."""
    return {path.resolve() for path in _needed()}


def _layers(hidden: Iterable[Path]) -> list[tuple[Path, bool]]:
    """Return what is kept (False) and what is hidden (True), the outermost folder first.

    So a hidden folder covers a kept one around it, and a kept one inside is there again: the
    course may lie in /usr/src, and its environment in the course.
    """
    layers: dict[Path, bool] = {}
    found = [(path, False) for path in _kept()] + [(path, True) for path in hidden]
    for path, covers in sorted(found, key=lambda layer: (len(layer[0].parts), layer)):
        around = next((layers[p] for p in (path, *path.parents) if p in layers), True)
        if covers != around:
            layers[path] = covers
    return [*layers.items()]


def _links() -> list[Path]:
    """Return the symbolic links on the way to what is needed, each by its real folder."""
    found: dict[Path, None] = {}
    for path in sorted(_needed()):
        place, parts = Path("/"), [*path.parts[1:]]
        while parts:
            step = place / parts.pop(0)
            if step.is_symlink():
                found[step] = None
                target = step.readlink()
                place = place / target.anchor
                parts = [*target.relative_to(target.anchor).parts, *parts]
            else:
                place = step.resolve()  # it may be ".."
    return [*found]


def _copy(tree: Path, root: Path) -> None:
    """Copy the graded tree. Students leave code that writes a log or a trace next to the sources;
    what is written is gone with the exam."""
    target = root / tree.relative_to("/")
    target.mkdir(parents=True, exist_ok=True)
    _tmpfs(target, TREE, "1777")
    shutil.copytree(tree, target, dirs_exist_ok=True)
    for path in (target, *target.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def is_in_kept(path: Path) -> bool:
    """Return whether a path is in a folder that graded code sees, so that it must be hidden."""
    return any(folder == path or folder in path.parents for folder in _kept())


def _bind(path: Path, root: Path, *, writable: bool = False) -> None:
    target = root / path.relative_to("/")
    if path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(str(path), str(target), None, MS_BIND | MS_REC)
    if not writable:
        flags = os.statvfs(path).f_flag
        kept = flags & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)  # must be kept in a remount
        kept |= MS_RELATIME if flags & 4096 else 0
        _mount(None, str(target), None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def _link(link: Path, root: Path) -> None:
    target = root / link.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(target):  # it may be in a folder that is bound
        target.symlink_to(link.readlink())


def _proc(root: Path) -> None:
    """Mount the /proc of the new namespace, or copy the files about the machine if not allowed."""
    (root / "proc").mkdir()
    try:
        _mount("proc", str(root / "proc"), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:
        for name in MACHINE:
            shutil.copyfile(Path("/proc", name), root / "proc" / name)


def _tmpfs(path: Path, size: int, mode: str) -> None:
    options = f"size={size},nr_inodes={MOST_FILES},mode={mode}"
    _mount("tmpfs", str(path), "tmpfs", MS_NOSUID | MS_NODEV, options)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind, data))
    a, b, c, d = texts
    if libc().mount(a, b, c, ctypes.c_ulong(flags), d):
        error = ctypes.get_errno()
        raise OSError(error, f"mount {target}: {os.strerror(error)}")


def libc() -> ctypes.CDLL:
    """Return the C library. Python's `os` has these functions only from 3.12 on."""
    return ctypes.CDLL(None, use_errno=True)
