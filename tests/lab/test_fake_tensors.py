"""What a step of the real size launches on a GPU, counted with tensors that have no numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.process import run_python

pytest.importorskip("triton", reason="Triton is for Linux")
LAYERS, KERNELS_OF_A_LAYER = 28, 12  # of Qwen3-0.6B; SPEED.md names the kernels
AROUND = 20  # embedding, angles, last norm, head; placeholders and sampling


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler: a build of torch without CUDA needs a guard of devices")
    output = run_python("-m", "tests.helpers.fake_tensors", TRITON_INTERPRET=None)
    found: dict[str, Any] = json.loads(output)
    return found


def total(launches: Mapping[str, int]) -> int:
    return sum(count for name, count in launches.items() if name != "tokens")


@pytest.mark.thorough("it makes a model of the real size, without its numbers")
def test_a_step_of_the_real_size_launches_few_kernels(report: dict[str, Any]) -> None:
    prefill, *decodes = report["steps"]
    assert prefill["tokens"] == 432 and "replay" not in prefill
    assert total(prefill) <= LAYERS * KERNELS_OF_A_LAYER + AROUND
    assert total(report["graph"]) <= LAYERS * KERNELS_OF_A_LAYER + AROUND
    assert len(decodes) == 5
    for step in decodes:
        assert step["tokens"] == 3 and step["replay"] == 1
        assert total(step) <= 12  # copies, the graph, two kernels of the sampler, the future map


@pytest.mark.thorough("it makes a model of the real size, without its numbers")
def test_a_step_of_the_real_size_does_not_wait(report: dict[str, Any]) -> None:
    assert report["waits"] == []
    assert set(report["variants"].values()) == {1}, "a variant compiles while requests wait"
