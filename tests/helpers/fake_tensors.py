"""Count what a step of the real size launches on a GPU, with tensors that have no numbers.

    python -m tests.helpers.fake_tensors

m5 serves requests with a model of the shape of Qwen3-0.6B. Its tensors on the device are
torch's `FakeTensor`s: they have shapes, strides and devices, and take no memory. So every launch,
a wait of the host, and an operation with tensors of both sides can be seen on any machine. A Triton
kernel is not run: a launch only asks Triton which variant it needs.

The output is JSON: the launches of each step by name, those inside a graph, the waits of the host
while steps are launched, and the number of variants of each kernel. This runs in a process of its
own, because Triton decides at its import whether it interprets, and torch keeps the device guard.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from transformers import AutoModelForCausalLM
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from common import EngineConfig, SamplingParams
from common.fast.passes import apply_passes, merge
from common.hf import tiny
from common.hf.loaded_model import LoadedModel
from common.hf.probe import LayerKV
from common.sampling import choice, draw_kernels
from m5_overlap import LLMEngine, attention_backend
from m5_overlap.kv_cache import PageTable
from m5_overlap.model_input import ModelInput
from m5_overlap.model_runner import ModelRunner, StepResult
from m5_overlap.schedule_batch import ScheduleBatch
from milestones.lab.instruments.fake_cuda import FakeCuda, FakeGraph
from milestones.lab.instruments.fake_operations import storage_key

ARCHITECTURE, FIELDS = tiny.SHAPES["qwen3-0.6b"]
BACKEND = make_backend(GPUTarget("cuda", 90, 32))
GPU = torch.device("cuda", 0)
NO_LAUNCH = ("device", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
"""
PROMPTS = [[5, 6, 7, 8] * 100, [9] * 30, [200, 3]]


class NoGpu(FakeTensorMode):
    """Fake tensors for a build of torch without CUDA, although `is_available` says something else.

    torch then guards devices that it does not have, and `torch.tensor` copies to them afterwards.
    """

    avoid_device_init = True


class Launches(TorchDispatchMode):
    """Makes the tensors of a GPU fake ones, and counts what is launched for them."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = NoGpu(allow_non_fake_inputs=True)
        self.counts = Counter[str]()
        self.waits = list[str]()
        self.variants: dict[str, set[str]] = {}
        self.pinned = set[int]()  # storages

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), op.overloadpacket.__name__
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        host = [x for x in given if not isinstance(x, FakeTensor)]
        target = kwargs.get("device")
        to_gpu = target is not None and torch.device(target).type == "cuda"
        if not to_gpu and len(host) == len(given):
            is_pinned = kwargs.pop("pin_memory", False)
            result = op(*args, **kwargs)
            self.pinned |= {storage_key(result)} if is_pinned else set()
            return result
        crosses = bool(host) or (target is not None and not to_gpu)
        if crosses and name in ("copy_", "_to_copy", "to"):  # `to` in inference mode
            returns_at_once = kwargs.get("non_blocking", [*args, False, False][2])
            if not returns_at_once or any(storage_key(x) not in self.pinned for x in host):
                self.waits.append(name)
        if name == "copy_" and host and host[0] is args[0]:
            self.counts["copy to the host"] += 1
            return args[0].fill_(1)  # what has no numbers becomes tokens that exist
        twins = {id(x): self.fake.from_tensor(x) for x in host}
        args, kwargs = tree_map(lambda x: twins.get(id(x), x), (args, kwargs))
        with self.fake:
            try:
                result = op(*args, **kwargs)
            except DataDependentOutputException:
                self.waits.append(name)
                raise
        if not op.is_view and name not in NO_LAUNCH:
            self.counts[name] += 1
        return result

    def replayed(self) -> None:
        self.counts["replay"] += 1

    def kernel(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Note the launch of a Triton kernel, in the place of `JITFunction.run`."""
        bind = create_function_from_signature(function.signature, function.params, BACKEND)
        _values, specialization, chosen = bind(*args, debug=False, **options)
        found = self.variants.setdefault(function.__name__, set())
        found.add(f"{specialization} {chosen}")
        self.counts[function.__name__] += 1


def main() -> None:
    register_guard()
    launches = Launches()
    with fake_gpu(launches):
        report = serve(load_fake_model(), launches)
    variants = {name: len(found) for name, found in launches.variants.items()}
    sys.stdout.write(json.dumps({**report, "waits": launches.waits, "variants": variants}))


def register_guard() -> None:
    """Let a build of torch without CUDA index tensors that are on a GPU."""
    home = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{home}/include", f"-L{home}/lib"]
        run(["c++", *flags, source, "-o", library, "-lc10"], check=True)
        ctypes.CDLL(str(library))


@contextmanager
def fake_gpu(launches: Launches) -> Iterator[None]:
    """Return a context with a GPU, on which tensors have no numbers.

    What compares numbers is left out: passes and models are tested elsewhere.
    """
    cuda = FakeCuda(free_bytes=2**36)
    properties = SimpleNamespace(total_memory=2**36, name="Fake GPU")
    fakes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_of", lambda _: nullcontext()),
        (torch.cuda, "get_device_name", lambda device=None: "Fake GPU"),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "_lazy_init", lambda: None),
        (JITFunction, "run", lambda *args, **kwargs: launches.kernel(*args, **kwargs)),
        (torch, "allclose", lambda *args, **kwargs: True),
        (merge, "_alike", lambda linears: True),
        (choice, "kernels_on", lambda device, dtype: draw_kernels),
        (attention_backend, "kernels_run", lambda *args: True),
    ]
    with ExitStack() as undo:
        undo.enter_context(cuda.installed())
        for where, name, fake in fakes:
            undo.enter_context(patch.object(where, name, fake))
        undo.enter_context(
            patch.object(FakeGraph, "replay", lambda graph: launches.counts.update(["replay"]))
        )
        undo.enter_context(launches)
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` copies to a device afterwards
        yield


def load_fake_model() -> LoadedModel:
    """Return the model with its passes, on the GPU."""
    config = tiny.config_class(ARCHITECTURE)(**FIELDS, eos_token_id=0, pad_token_id=0)
    with GPU:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    apply_passes(model)
    return LoadedModel("fake", model, tiny.byte_tokenizer(FIELDS["vocab_size"]))


def serve(loaded: LoadedModel, launches: Launches) -> dict[str, Any]:
    """Serve three requests. Return the launches of a graph and of each step, by name."""
    graph = Counter[str]()
    steps = list[dict[str, int]]()
    launches.variants.clear()  # those of the trials of the passes
    with watched_runner(launches, graph, steps):
        engine = LLMEngine(EngineConfig(device="cuda", max_num_seqs=4), loaded)
        launches.waits.clear()
        params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
        engine.generate(PROMPTS, params, progress=False)
    return {"graph": graph, "steps": steps}


@contextmanager
def watched_runner(
    launches: Launches, graph: Counter[str], steps: list[dict[str, int]]
) -> Iterator[None]:
    """Return a context in which the runner notes its launches, and compares no numbers."""
    layer = LayerKV(FIELDS["num_key_value_heads"], FIELDS["head_dim"], FIELDS["head_dim"])
    layers = [layer] * FIELDS["num_hidden_layers"]
    pages = SimpleNamespace(page_table=lambda page_size: torch.zeros(2, 1, dtype=torch.int32))
    launch, forward = ModelRunner.launch, ModelRunner.forward

    def watched_launch(self: ModelRunner, batch: ScheduleBatch, table: PageTable) -> StepResult:
        launches.counts.clear()
        result = launch(self, batch, table)
        steps.append({"tokens": batch.num_tokens, **launches.counts})
        return result

    def watched_forward(self: ModelRunner, inputs: ModelInput) -> torch.Tensor:
        before = launches.counts.copy()
        logits = forward(self, inputs)
        if inputs.descriptor is not None:
            graph.clear()
            graph.update(launches.counts - before)
        return logits

    fakes: dict[str, Any] = {
        "probe": lambda self, model, config: (pages, layers),
        "check": lambda self, probe, table: None,
        "launch": watched_launch,
        "forward": watched_forward,
    }
    with patch.multiple(ModelRunner, **fakes):
        yield


if __name__ == "__main__":
    main()
