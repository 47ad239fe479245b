"""What the worker of a page loads: Python for the browser, and a zip of our files.

Python is Pyodide, from npm, in the version that `package-lock.json` names with its hash. The zip
has exactly the files that the figures import. Its bytes depend on nothing but them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ..chain import ROOT

HERE = Path(__file__).parent
PYODIDE = (
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json",
)  # fmt: skip
EPOCH = (1980, 1, 1, 0, 0, 0)  # the date of each file in the zip
# The files that a process has imported after it has drawn each figure once.
IMPORTED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from milestones.book.figures import NAMES, drawn
for name in NAMES:
    drawn(name, "{{}}")
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None)
    if file and file.startswith({str(ROOT)!r}) and "/.venv/" not in file:
        print(file)
"""


class BookError(Exception):
    """The site cannot be made. The message says what is missing."""


def fetch(packages: Path) -> None:
    """Install the packages of npm into a folder, unless they are there."""
    lock = (HERE / "package-lock.json").read_bytes()
    copy = packages / "package-lock.json"
    if copy.is_file() and copy.read_bytes() == lock and (packages / "node_modules").is_dir():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise BookError("the site needs npm, which comes with Node.js: https://nodejs.org")
    packages.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(HERE / name, packages / name)
    done = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund"], cwd=packages, capture_output=True, text=True
    )
    if done.returncode:
        copy.unlink()
        raise BookError(f"npm ci has failed: {done.stderr.strip()[-500:]}")


def write(packages: Path, static: Path) -> None:
    """Write what the worker loads into the folder of static files."""
    (static / "pyodide").mkdir(parents=True, exist_ok=True)
    for name in PYODIDE:
        shutil.copyfile(packages / "node_modules/pyodide" / name, static / "pyodide" / name)
    write_zip(static / "ladder.zip")


def files() -> list[str]:
    """Return the files of this repository that the figures import, from the root."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    return sorted({str(Path(line).relative_to(ROOT)) for line in done.stdout.splitlines()})


def write_zip(path: Path) -> None:
    """Pack these files."""
    with zipfile.ZipFile(path, "w") as packed:
        for name in files():
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(info, (ROOT / name).read_bytes())
