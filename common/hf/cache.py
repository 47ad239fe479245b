"""The folder in which models and kernels are kept after they were converted or compiled once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What the system says about a place where nothing can be written.
REFUSED = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
}  # fmt: skip
NO_SPACE = "os error 28"  # in messages of libraries in Rust, which have no number


class CacheFolderError(ValueError):
    """Nothing can be written to the cache folder. The message says what to do."""


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Raise `CacheFolderError` if the system does not let this code write to the cache folder."""
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        named = getattr(error, "filename", None)
        is_elsewhere = named is not None and not str(named).startswith(str(folder))
        if is_elsewhere or (number not in REFUSED and NO_SPACE not in str(error)):
            raise
        reason = os.strerror(number or errno.ENOSPC)
        raise CacheFolderError(
            f"{folder} cannot be written: {reason}. The converted model needs some hundred MB "
            "there. The variable LLM_LADDER_CACHE names another folder"
        ) from error


def cache_folder() -> Path:
    """Return `$LLM_LADDER_CACHE` if it is set, else `llm-ladder` in the user's cache folder."""
    if override := os.environ.get("LLM_LADDER_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-ladder"
