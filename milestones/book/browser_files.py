"""What the workers of a page load: Python for the browser, and a zip of files for each purpose.

Python is Pyodide, from npm, in the version that `package-lock.json` names with its hash. Its
library is compiled once (`compile_library.mjs`). The zip of the figures has exactly the files that
they import, and so has that of the exercises (`exercise_files.py`). The bytes of a zip depend on
nothing but these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ..chain import ROOT

HERE = Path(__file__).parent
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json")
LIBRARY = "python_stdlib.zip"  # compiled
EPOCH = (1980, 1, 1, 0, 0, 0)  # the date of each file in the zip
DRAW_ALL = """
from milestones.book.figures import NAMES, drawn
for name in NAMES:
    drawn(name, "{}")
"""
# Code that runs first, and then the files that the process has imported.
IMPORTED = """
import sys
sys.path.insert(0, {root!r})
{code}
for module in list(sys.modules.values()):
    if file := getattr(module, "__file__", None):
        print("FILE", file)
"""
# An import of a package at the start of a line: the words before its name, and the name.
NAMED = re.compile(
    r"""^((?:import|export)\b[^"';]*\bfrom\s*|import\s*)(["'])([@\w][^"']*)\2""", re.MULTILINE
)


class BookError(Exception):
    """The site cannot be made. The message says what is missing."""


def fetch(folder: Path) -> Path:
    """Return the folder with the packages of npm: one for each version of the files that say which.

    The first call installs them, and compiles Python's library.
    """
    sources = [HERE / name for name in ("package.json", "package-lock.json", "compile_library.mjs")]
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    packages = folder / version
    if packages.is_dir():
        return packages
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise BookError("the site needs npm, which comes with Node.js: https://nodejs.org")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        new = Path(made) / "packages"
        new.mkdir()
        for path in sources:
            shutil.copyfile(path, new / path.name)
        for command in ([npm, "ci", "--no-audit", "--no-fund"], [node, sources[-1].name]):
            done = subprocess.run(command, cwd=new, capture_output=True, text=True)
            if done.returncode:
                failed = f"{Path(command[0]).name} {command[1]}"
                raise BookError(f"{failed} has failed: {done.stderr.strip()[-500:]}")
        with contextlib.suppress(OSError):  # another build was faster
            new.rename(packages)
    return packages


def write(packages: Path, static: Path) -> None:
    """Write Pyodide, the editor and the files of the figures into the folder of static files."""
    modules = packages / "node_modules"
    (static / "pyodide").mkdir(parents=True, exist_ok=True)
    for path in (packages / LIBRARY, *(modules / "pyodide" / name for name in PYODIDE)):
        shutil.copyfile(path, static / "pyodide" / path.name)
    write_editor(modules, static / "codemirror")
    files = {name: (ROOT / name).read_bytes() for name in figure_files()}
    write_zip(static / "figures.zip", files)


def write_editor(modules: Path, folder: Path) -> None:
    """Write the packages of the editor as modules that name each other by file.

    A browser does not find the package `@codemirror/view`, but its file beside this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    todo = [*json.loads((HERE / "package.json").read_text("utf-8"))["dependencies"]]
    todo.remove("pyodide")
    done = set[str]()
    while todo:
        package = todo.pop()
        if package in done:
            continue
        done.add(package)
        source = modules / package
        about = json.loads((source / "package.json").read_text("utf-8"))
        text = (source / about["exports"]["import"]).read_text("utf-8")
        todo += {name for _, _, name in NAMED.findall(text)}
        text = NAMED.sub(lambda found: f'{found[1]}"./{flat(found[3])}.js"', text)
        (folder / f"{flat(package)}.js").write_text(text, encoding="utf-8")
        shutil.copyfile(source / "LICENSE", folder / f"{flat(package)}.LICENSE.txt")


def flat(package: str) -> str:
    """Return the name of a package's file: `codemirror-view`."""
    return package.removeprefix("@").replace("/", "-")


def figure_files() -> list[str]:
    """Return the files of this repository that the figures import, from the root."""
    return [name for name in map(of_repository, imported_files(DRAW_ALL)) if name]


def imported_files(code: str) -> list[Path]:
    """Return the files that a process has imported after it has run some code."""
    command = [sys.executable, "-c", IMPORTED.format(root=str(ROOT), code=code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BookError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = done.stdout.splitlines()
    return sorted({Path(line[5:]) for line in lines if line.startswith("FILE ")})


def of_repository(path: Path) -> str:
    """Return the path of a file of ours from the root, or "" for any other file."""
    inside = path.is_relative_to(ROOT) and ".venv" not in path.relative_to(ROOT).parts
    return path.relative_to(ROOT).as_posix() if inside else ""


def write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    """Pack files."""
    with zipfile.ZipFile(path, "w") as packed:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(info, files[name])
