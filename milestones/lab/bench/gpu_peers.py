"""The measurements of other engines on a GPU for `gpu-check`, with the weights of ours.

vLLM is measured if this Python has it. nano-vllm and mini-sglang are read from a folder that the
user names, with a checkout of each: `gpu-check --only nano --peers FOLDER`. This Python must have
what they need (FlashAttention, FlashInfer).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from common import EngineConfig, LoadedModel, load_model

from .engines import PipedEngine
from .gpu_speed import Rows, rows_of

# By the name of a checkout: the folder in it that Python must find.
CHECKOUTS = {"nano-vllm": ".", "mini-sglang": "python"}


def has_vllm() -> bool:
    """Return whether this Python has vLLM."""
    return importlib.util.find_spec("vllm") is not None


def of_vllm(device: str, model: str) -> Rows:
    """Measure vLLM on each workload."""
    with _saved(device, model) as (loaded, folder):
        vllm = PipedEngine("vllm", Path(sys.executable), lambda: folder, forgets=True)
        try:
            yield from rows_of(vllm.run, loaded, device, is_peer=True)
        finally:
            vllm.close()


def of_checkout(name: str, checkouts: Path, device: str, model: str) -> Rows:
    """Measure nano-vllm or mini-sglang on the standard benchmark."""
    options = ("--path", str((checkouts / name / CHECKOUTS[name]).resolve()))
    with _saved(device, model) as (loaded, folder):
        peer = PipedEngine(
            name, Path(sys.executable), lambda: folder, forgets=True, options=options
        )  # fmt: skip
        try:
            yield from rows_of(peer.run, loaded, device, is_peer=True, names=["nano"])
        finally:
            peer.close()


@contextmanager
def _saved(device: str, model: str) -> Iterator[tuple[LoadedModel, str]]:
    """Load a model, and write it to a folder for another process. It then leaves the GPU."""
    loaded = load_model(EngineConfig(model=model, device=device), plain=True)
    with tempfile.TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        loaded.model.to("cpu")  # type: ignore[arg-type]  # transformers wraps `to` without types
        if device != "cpu":
            torch.cuda.empty_cache()
        yield loaded, folder
