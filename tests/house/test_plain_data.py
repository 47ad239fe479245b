"""Plain data and what decides with it import without a model: no torch, no transformers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from milestones.chain import ROOT, milestones, package, sources
from milestones.course.catalog import load, taught_engines
from tests.house.test_layout import PLAIN_DATA

FORBIDDEN = ("numpy", "rich", "tokenizers", "torch", "transformers", "triton", "typing_extensions")
HOOK = f"""
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN}:
            raise ModuleNotFoundError(f"{{name}} is forbidden here", name=name)

sys.meta_path.insert(0, Forbidden())
"""
DATA = """
from common import (
    CompletionOutput, EngineConfig, EngineStats, LoRARequest, PoolingParams,
    PoolingRequestOutput, Request, RequestOutput, SamplingParams, StructuredOutputsParams,
    TokensPrompt,
)
for device in ("auto", "cpu", "cuda", "cuda:1"):
    assert EngineConfig(device=device).max_num_batched_tokens == 2048
params = SamplingParams(max_tokens=3, stop=["."], logprobs=1, logit_bias={5: 1.0}, min_tokens=1)
request = Request(
    "a", None, [1, 2], params, seed=0, max_model_len=8, text=None, arrival_time=0.0
)
assert request.max_num_tokens == 5
"""


RUN = """
import inspect
from common import EngineConfig, Request, SamplingParams
from milestones.chain import load
from milestones.lab.instruments.hash_chain import expected_tokens
from milestones.lab.instruments.plain_runner import PlainRunner

def request_of(name, prompt, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return Request(name, None, prompt, params, seed=0, max_model_len=40, text=None, arrival_time=0)

EngineCore = load(milestone, "engine").EngineCore
config = EngineConfig(max_model_len=40, max_num_seqs=3, page_size=4, max_num_batched_tokens=16)
arguments = [PlainRunner(num_pages=11)]
if "config" in inspect.signature(EngineCore).parameters:
    arguments.insert(0, config)
core = EngineCore(*arguments)
prompts = [[n, *range(1, 4 + n)] for n in range(6)]
requests = [request_of(str(n), prompt, 5 + n) for n, prompt in enumerate(prompts)]
for request in requests:
    core.add_request(request)
core.step()
core.finish(requests[5], "abort")
while core.scheduler.waiting or core.scheduler.running:
    core.step()
    core.check_invariants()
for n, prompt in enumerate(prompts[:5]):
    assert requests[n].finish_reason == "length"
    assert requests[n].output_token_ids == expected_tokens(prompt, 5 + n), n
core.close()
"""


# Exercises of plain data: `check` runs their tests without torch, so it answers in two seconds.
PLAIN_EXERCISES = [
    "m1.1", "m2.1", "m2.2", "m2.3", "m3.1", "m3.3", "m3.4", "m4.1", "m4.2", "m4.3", "m4.4",
    "m4.5", "m5.3", "agents.1", "agents.2", "agents.3", "disaggregated.1",
    "disaggregated.2", "hybrid_memory.1",
    "hybrid_memory.2", "hybrid_memory.3", "multi_step.1", "multi_step.2", "priority.1",
    "priority.2", "speculative.1", "vision.1", "vision.2",
]  # fmt: skip
IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert "is forbidden here" in str(error), name
    else:
        print(name)
"""
RUN_TESTS = """
import sys, pytest
status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *sys.argv[1:]])
assert not {"numpy", "torch", "transformers"} & sys.modules.keys(), "imported during a test"
sys.exit(status)
"""


def run_without_a_model(
    code: str, *arguments: str, hook: str = HOOK
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that cannot import the forbidden packages."""
    command = [sys.executable, "-c", hook + code, *arguments]
    # A worker of xdist imports torch to set its number of threads; the child is none.
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )


def test_the_hook_forbids() -> None:
    """A model needs torch, and so do an engine and the names of `common` that load a model."""
    for code in ("import torch", "import numpy.linalg", "from common import load_model",
                 "from m1_single import LLMEngine; LLMEngine()"):  # fmt: skip
        done = run_without_a_model(code)
        assert done.returncode == 1 and "is forbidden here" in done.stderr, code


def test_the_data_of_a_request_needs_no_model() -> None:
    done = run_without_a_model(DATA)
    assert done.returncode == 0, done.stderr


@pytest.mark.electives
@pytest.mark.before("lora", "structured_output")  # their schedulers hold matrices and grammars
def test_what_decides_needs_no_model(milestone: str) -> None:
    """Schedulers, page tables and trees: those of an elective too, with the files of m5."""
    found = [name.removesuffix(".py") for name in PLAIN_DATA if name in sources(milestone)]
    assert "scheduler" in found
    done = run_without_a_model("".join(f"import {package(milestone)}.{name}\n" for name in found))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", milestones())
def test_a_core_runs_without_a_model(name: str) -> None:
    """`engine.py` and all that it decides with: only the runner is another one."""
    done = run_without_a_model(f"milestone = {name!r}\n" + RUN)
    assert done.returncode == 0, done.stderr


def test_which_exercises_have_plain_data() -> None:
    """The files of their tests, and all that these import, need no model: those and no others."""
    exercises = {e.id: e.tests for name in taught_engines() for e in load(name)}
    modules = {
        name: [test.partition(".py")[0].replace("/", ".") for test in tests]
        for name, tests in exercises.items()
    }
    every = sorted({module for names in modules.values() for module in names})
    done = run_without_a_model(IMPORT_EACH, *every)
    assert done.returncode == 0, done.stderr
    plain = {name for name, needed in modules.items() if {*needed} <= {*done.stdout.split()}}
    assert plain == {*PLAIN_EXERCISES}
    tests = [test for name in PLAIN_EXERCISES for test in exercises[name]]
    done = run_without_a_model(RUN_TESTS, *tests, hook="")  # they could import all
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_name_is_an_error() -> None:
    """The lazy names are attributes, and nothing else is."""
    import common
    import m5_overlap

    assert common.LLMEngine in m5_overlap.LLMEngine.__mro__
    for module in (common, m5_overlap):
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'Nothing'"):
            _ = module.Nothing
