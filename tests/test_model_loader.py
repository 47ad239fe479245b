"""Loading models: names, folders, and the conversion of GGUF files into the cache."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from common import EngineConfig, embedded, load_model
from common.embedded import EmbeddedModelMissingError, converted_folder, gguf_folder, is_embedded
from tests.conftest import shared_model


def test_tiny_models_are_the_same_every_time() -> None:
    first = load_model(EngineConfig(model="tiny-llama")).model.state_dict()
    again = load_model(EngineConfig(model="tiny-llama")).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_dtype_and_device() -> None:
    assert (
        load_model(EngineConfig(model="tiny-llama", dtype="bfloat16")).model.dtype == torch.bfloat16
    )
    assert load_model(EngineConfig(model="tiny-llama", device="cpu")).model.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "tiny-unicorn"}, "tiny-llama"),
        ({"model": "/nowhere/at-all"}, "could not be loaded"),
        ({"model": "missing.gguf"}, "does not exist"),
        ({"model": "tiny-llama", "device": "abacus"}, "device"),
    ],
)
def test_what_cannot_be_loaded(config: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(EngineConfig(**config))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        load_model(EngineConfig(model="tiny-llama", device="cuda"))


def test_a_local_folder(tmp_path: Path) -> None:
    loaded = shared_model("tiny-qwen3")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(EngineConfig(model=str(tmp_path)))
    assert again.tokenizer.encode("abc") == loaded.tokenizer.encode("abc")
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(again.model(tokens).logits, loaded.model(tokens).logits)


@pytest.mark.parametrize(
    "name",
    ["SmolLM2-135M-Instruct", "smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"],
)
def test_names_of_the_embedded_model(name: str) -> None:
    assert is_embedded(name)


def test_the_embedded_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EmbeddedModelMissingError, match="pip install"):
        load_model(EngineConfig())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The cache folder is empty, and converting writes one file; the calls are listed."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("half")
        if gguf.stem == "broken":
            raise KeyboardInterrupt
        threading.Event().wait(0.05)
        (folder / "weights").write_text("whole")

    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_convert", convert)
    return calls


def test_a_model_is_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_text("x")
    assert gguf_folder(gguf) == gguf_folder(gguf)
    assert len(conversions) == 1
    gguf.write_text("another model")
    assert (gguf_folder(gguf) / "weights").read_text() == "whole"
    assert len(conversions) == 2, "a changed file is converted anew"


def test_two_at_once_convert_once(conversions: list[Path], tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(converted_folder(tmp_path / "a.gguf", "a")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1 and len(folders) == 4 and len(conversions) == 1
    assert (folders[0] / "weights").read_text() == "whole"


def test_a_conversion_that_was_killed_is_made_again(
    conversions: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        converted_folder(tmp_path / "broken.gguf", "a")
    # What a killed process could not clean up, the next one does.
    abandoned = tmp_path / "cache" / "a.partial-x"
    abandoned.mkdir()
    folder = converted_folder(tmp_path / "a.gguf", "a")
    assert (folder / "weights").read_text() == "whole"
    assert not list((tmp_path / "cache").glob("*.partial-*"))
