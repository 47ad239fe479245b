"""Loading models: names, folders, and the conversion of GGUF files into the cache."""

from __future__ import annotations

import errno
import functools
import json
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common import EngineConfig, SamplingParams, load_model
from common.fast.cpu_kernels import kernels
from common.hf import device, gguf_folders, model_loading
from common.hf.cache import CacheFolderError
from common.hf.gguf_folders import (
    EmbeddedModelMissingError,
    converted_folder,
    gguf_folder,
    is_embedded,
)
from common.hf.tiny import SHAPES, SPECIAL_TOKENS, byte_tokenizer, config_class
from m1_single import LLMEngine
from milestones.lab.bench.workloads import workload
from tests.conftest import plain_model, shared_model
from tests.helpers.process import run_python
from tests.helpers.tiny_configs import tiny_config


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
        ({"model": "/nowhere/at-all"}, "was not found"),
        ({"model": "missing.gguf"}, "does not exist"),
        ({"model": "tiny-llama", "device": "abacus"}, "device"),
        ({"model": "tiny-llama", "device": "cuda"}, "no CUDA device"),
        ({"model": "random-huge", "device": "cpu"}, "random-huge.*random-qwen3-0.6b"),
    ],
)
def test_what_cannot_be_loaded(config: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(EngineConfig(**config))  # type: ignore[arg-type]


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
    """The list of conversions. The cache folder is empty, and a conversion writes one file."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "weights").write_text("half")
        if gguf.stem == "broken":
            raise KeyboardInterrupt
        threading.Event().wait(0.05)
        (folder / "weights").write_text("whole")

    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_folders, "_convert_stored", convert)
    return calls


def convert_again(gguf: Path) -> Path:
    return converted_folder(gguf, "a", gguf_folders._convert_stored)


def test_a_model_is_converted_once(conversions: list[Path], tmp_path: Path) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_text("x")
    assert gguf_folder(gguf) == gguf_folder(gguf)
    assert len(conversions) == 1
    gguf.write_text("another model")
    assert (gguf_folder(gguf) / "weights").read_text() == "whole"
    assert len(conversions) == 2, "a changed file was not converted again"


def test_two_at_once_convert_once(conversions: list[Path], tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(convert_again(tmp_path / "a.gguf")))
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
        convert_again(tmp_path / "broken.gguf")
    # The next process removes what a killed process could not clean up.
    abandoned = tmp_path / "cache" / "a.partial-x"
    abandoned.mkdir()
    folder = convert_again(tmp_path / "a.gguf")
    assert (folder / "weights").read_text() == "whole"
    assert not list((tmp_path / "cache").glob("*.partial-*"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EROFS, "x"), "Read-only file system"),
        (OSError(errno.ENOSPC, "x"), "No space left on device"),
        (RuntimeError("IoError: No space left on device (os error 28)"), "No space left on device"),
    ],
    ids=["read-only", "full", "full, in Rust"],
)
def test_a_cache_folder_that_cannot_be_written(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file of the model is whole: to download it again would not help."""

    def convert(gguf: Path, folder: Path) -> None:
        raise error

    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_folders, "_convert_stored", convert)
    with pytest.raises(CacheFolderError, match=f"{reason}.*LLM_LADDER_CACHE") as raised:
        convert_again(tmp_path / "a.gguf")
    assert "download" not in str(raised.value)
    assert not list((tmp_path / "cache").glob("*.partial-*"))


def test_a_cache_folder_that_is_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/cache"):
        monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / folder))
        with pytest.raises(CacheFolderError, match="cannot be written"):
            convert_again(tmp_path / "a.gguf")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a tiny model, which a test can damage."""
    loaded = plain_model("tiny-llama")
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def configure(folder: Path, **values: object) -> None:
    """Change values in the config.json of a checkpoint."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose_safetensors(folder: Path) -> None:
    torch.save(weights_of(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def lose_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def spoil_a_weight(folder: Path, number: float) -> None:
    weights = weights_of(folder)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = number
    write_weights(folder, weights)


def shrink_vocabulary(folder: Path) -> None:
    small = tiny_config("llama", vocab_size=100, eos_token_id=1, pad_token_id=1)
    AutoModelForCausalLM.from_config(small).save_pretrained(folder)


def add_a_token(folder: Path) -> None:
    """It belongs to another model, unless the token was added: see `test_added_tokens.py`."""
    byte_tokenizer(260 + len(SPECIAL_TOKENS)).save_pretrained(folder)


def bring_own_code(folder: Path) -> None:
    """transformers would ask on the terminal whether to run it."""
    configure(folder, model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text("raise SystemExit('this code was run')")


NOT_FINITE = r"infinite numbers in model\.layers\.1\.mlp\.up_proj"
Damage = Callable[[Path], None] | dict[str, Any]
DAMAGES: list[tuple[Damage, str]] = [  # a function, or values for the config.json
    ({"num_hidden_layers": 3}, r"no weights for model\.layers\.2\..* and 6 more"),
    ({"num_hidden_layers": 1}, r"more layers than the configuration, such as model\.layers\.1"),
    ({"model_type": "qwen3"}, r"no weights for model\.layers\.0\.self_attn\.k_norm\.weight"),
    ({"intermediate_size": 64}, r"other sizes for .*down_proj.*\[64, 128\], not \[64, 64\]"),
    ({"hidden_size": "64"}, r"config\.json is missing or wrong.*hidden_size"),
    (
        {"num_attention_heads": 5},
        r"config\.json is missing or wrong[^(]*\(64\)[^(]*attention heads \(5\)",
    ),
    ({"model_type": "unicorn"}, "config.json is missing or wrong"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized .*gptq"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantized .*awq"),
    (lambda folder: cut_short(folder / "model.safetensors"), "safetensors is damaged or was cut"),
    (lose_safetensors, r"pytorch_model\.bin is a pickle file"),
    (functools.partial(spoil_a_weight, number=torch.nan), NOT_FINITE),
    (functools.partial(spoil_a_weight, number=torch.inf), NOT_FINITE),
    (functools.partial(spoil_a_weight, number=-torch.inf), NOT_FINITE),
    (shrink_vocabulary, r"token ids up to 255, .* only 100 \(vocab_size\)"),
    (add_a_token, r"token ids up to 259, .* only 259 \(vocab_size\)"),
    (lose_tokenizer, "the tokenizer of .* could not be loaded"),
    (bring_own_code, "config.json is missing or wrong"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[text for _, text in DAMAGES])
def test_a_checkpoint_that_is_damaged_or_does_not_fit_together(
    checkpoint: Path, damage: Damage, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(damage, dict):
        configure(checkpoint, **damage)
    else:
        damage(checkpoint)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(EngineConfig(model=str(checkpoint)))
    assert str(checkpoint) in str(caught.value), "the error does not name the model"


def test_a_head_that_is_tied_to_the_embedding_is_not_missing(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    plain_model("tiny-llama").tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in weights_of(tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path), model_passes="none"))
    assert torch.equal(loaded.model.state_dict()["lm_head.weight"], model.lm_head.weight)


def test_weights_that_a_model_has_no_use_for_are_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such weights may belong to another head. The model's answers are still right."""
    write_weights(checkpoint, {**weights_of(checkpoint), "value_head.weight": torch.ones(3)})
    load_model(EngineConfig(model=str(checkpoint)))
    assert "value_head.weight" in caplog.text


def test_large_weights_are_no_infinite_ones(checkpoint: Path) -> None:
    """Finite weights may have an infinite sum in float32."""
    weights = weights_of(checkpoint)
    weights["model.layers.1.mlp.up_proj.weight"][:] = 3e38
    write_weights(checkpoint, weights)
    load_model(EngineConfig(model=str(checkpoint), model_passes="none"))


def test_a_converted_model_that_was_damaged_is_converted_again(
    conversions: list[Path], checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = convert_again(tmp_path / "a.gguf")
    shutil.copy(checkpoint / "model.safetensors", folder)
    assert convert_again(tmp_path / "a.gguf") == folder and len(conversions) == 1
    cut_short(folder / "model.safetensors")
    assert convert_again(tmp_path / "a.gguf") == folder and len(conversions) == 2
    assert (folder / "weights").read_text() == "whole"
    assert not (folder / "model.safetensors").exists()
    assert "converted again" in caplog.text


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + bytes(16), b"no model" * 99])
def test_a_gguf_file_that_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.gguf could not be converted"):
        load_model(EngineConfig(model=str(file)))
    left = [path for path in (tmp_path / "cache").glob("broken*") if path.is_dir()]
    assert not left, "a half converted model is left"


def test_a_random_model_has_the_shape_of_a_real_one() -> None:
    """The standard benchmark runs on it where no model can be downloaded."""
    architecture, shape = SHAPES["qwen3-0.6b"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class(architecture)(**shape))
    assert sum(p.numel() for p in model.parameters()) == 596_049_920, "Qwen3-0.6B has as many"


def test_a_random_model_serves_the_standard_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, shape = SHAPES["qwen3-0.6b"]
    small = {**shape, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", (architecture, small))
    config = EngineConfig(model="random-qwen3-0.6b", device="cpu", max_num_seqs=2)
    loaded = load_model(config)
    assert loaded.vocab_size == len(loaded.tokenizer) == 151_936
    with LLMEngine(config, loaded) as engine:
        work = workload("nano", "random-qwen3-0.6b", loaded.vocab_size)
        longest = max(map(len, work.prompts)) + max(work.max_tokens)
        assert longest <= (engine.config.max_model_len or 0)
        params = SamplingParams(max_tokens=8, temperature=1, seed=1, ignore_eos=True)
        text = engine.generate(work.prompts[:1], params)[0].outputs[0].text
    assert len(text) > 8, "most tokens of a real vocabulary are several characters long"


def test_a_gpu_without_code_in_torch_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A V100 has 7.0. To name the device tries it all the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    assert device.resolve_device("auto").type == "cpu"
    assert "Tesla V100" in caplog.text and "7.0" in caplog.text and "CPU is used" in caplog.text
    assert device.resolve_device("cuda").type == "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert device.resolve_device("auto").type == "cuda"


def test_a_gpu_does_not_use_the_attention_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for each new length, so each decode step would wait for one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        device.open_device("cpu")
        assert torch.backends.cuda.cudnn_sdp_enabled(), "a CPU changes nothing"
        device.open_device("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_where_a_gpu_has_no_bfloat16_it_is_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Tesla T4")
    t4 = torch.device("cuda")
    assert device.half_type(t4, "auto") == torch.float16
    assert device.half_type(torch.device("cpu"), "auto") == torch.bfloat16
    assert device.half_type(t4, torch.float32) == torch.float32
    with pytest.raises(ValueError, match=r"'bfloat16', but Tesla T4 cannot .*'float16'"):
        device.resolve_dtype("bfloat16", t4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert device.half_type(t4, "auto") == device.resolve_dtype("bfloat16", t4) == torch.bfloat16


@pytest.mark.parametrize("has_bfloat16", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_frequencies_of_rope_keep_32_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, has_bfloat16: bool
) -> None:
    """In 16 bits, a token at position 1,000 would be rotated by a wrong angle. Hugging Face keeps
    them in float32, and so the answers of a checkpoint in bfloat16 are the same on a GPU.
    """
    tiny = plain_model("tiny-llama")
    monkeypatch.setattr(model_loading, "resolve_dtype", lambda name, _: getattr(torch, name, name))
    monkeypatch.setattr(device, "_has_bfloat16", lambda _device: has_bfloat16)
    AutoModelForCausalLM.from_config(tiny.model.config, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    tiny.tokenizer.save_pretrained(tmp_path)
    expected_dtype = torch.bfloat16 if has_bfloat16 and dtype == "auto" else torch.float16
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=expected_dtype).eval()
    ids, positions = torch.tensor([[5, 6, 7]]), torch.tensor([[3, 200, 411]])
    expected = theirs(input_ids=ids, position_ids=positions).logits
    for name in (str(tmp_path), "tiny-llama"):
        config = EngineConfig(model=name, device="cpu", dtype=dtype)
        model: Any = load_model(config, plain=True).model
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(model.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
        if name != "tiny-llama":
            assert model.dtype == expected_dtype
            assert torch.equal(model(input_ids=ids, position_ids=positions).logits, expected)


RESIDENT = """
import sys
from common import EngineConfig, load_model

def resident() -> int:
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

load_model(EngineConfig(model="tiny-llama"))
before = resident()
loaded = load_model(EngineConfig(model=sys.argv[1]))
print(resident() - before)
"""


@pytest.mark.thorough("a process, and a model of many megabytes")
@pytest.mark.skipif(kernels() is None, reason="without our kernels, weights become float32")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc for its freed memory")
def test_a_checkpoint_of_16_bits_takes_16_bits(tmp_path: Path) -> None:
    """The float32 numbers from which its weights are packed do not stay in the process."""
    config = plain_model("tiny-llama").model.config
    large = type(config)(
        **{**config.to_dict(), "hidden_size": 1024, "intermediate_size": 4096, "head_dim": None}
    )
    AutoModelForCausalLM.from_config(large, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain_model("tiny-llama").tokenizer.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    taken = int(run_python("-c", RESIDENT, str(tmp_path)))
    # Numbers in float32 that stay would take twice the size of the file, beside the packed ones.
    assert taken < 2 * size, f"a file of {size} bytes took {taken} bytes"


@pytest.mark.parametrize(("name", "meant"), [("SmolLM2-135M", True), ("xyz", False)])
def test_a_mistyped_name_names_the_models_that_are_there(
    name: str, meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The environment was read when the library was imported. It would try the network for long.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"'{name}' was not found.*tiny-llama") as error:
        load_model(EngineConfig(model=name, device="cpu"))
    assert ("did you mean 'SmolLM2-135M-Instruct'?" in str(error.value)) == meant
