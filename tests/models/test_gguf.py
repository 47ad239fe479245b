"""GGUF files: the weights stay as they are stored, and the answers are those of float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, GgufConfig

from common import EngineConfig, LoadedModel, load_model
from common.fast.cpu_kernels import kernels
from common.fast.passes import pack
from common.fast.stored.formats import FORMATS
from common.fast.stored.modules import stored_of, with_stored
from common.hf.gguf_folders import decode_bytes
from tests.helpers.stored_weights import QUANTIZED, GgufModel

pytestmark = pytest.mark.cpu

TOKENS = torch.arange(3, 40)[None]
READ = set() if kernels() is None else {*FORMATS}  # without our kernels, weights become float32


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLM_LADDER_CACHE", str(tmp_path / "cache"))


def load(file: Path, **config: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(file), **config))


def formats(model: Any) -> set[str]:
    return {weight.format.name for module in with_stored(model) for weight in stored_of(module)}


def their_model(folder: Path) -> Any:
    """Return the model as transformers reads it from the file `a.gguf`."""
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="a.gguf", quantization_config=GgufConfig(dequantize=True)
    )


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    answer: torch.Tensor = model(TOKENS).logits
    return answer


def assert_close(ours: Any, theirs: Any) -> None:
    """Assert that two models differ by rounding only; some have large logits."""
    expected = logits(theirs)
    off = (logits(ours) - expected).abs().max() / expected.abs().max()
    assert off < 1e-4, f"the logits differ by {off:.1e} of the largest"


@pytest.mark.parametrize("kind", [*QUANTIZED, "F16", "BF16"])
def test_each_type_gives_the_answers_of_float32(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "PACKINGS", (pack.CompiledProduct,))
    made = GgufModel(tmp_path / "a.gguf", "llama", [kind])
    file = made.write()
    kept, whole, plain = (
        load(file),
        load(file, quantization="none"),
        load(file, model_passes="none"),
    )
    assert formats(kept.model) == {kind} & READ and not formats(whole.model)
    assert torch.equal(logits(kept.model), logits(whole.model)), "other bits than in float32"
    assert_close(plain.model, made.model)
    assert_close(kept.model, made.model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_names_and_orders_of_an_architecture(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Only Llama's file has the rows of q and k in another order; Qwen2 has biases."""
    sizes = {"head_dim": 128} if architecture == "qwen3" else {}  # all that transformers reads
    made = GgufModel(
        tmp_path / "a.gguf", architecture, ["Q8_0", "Q4_0", "BF16"], tie_word_embeddings=tied,
        **sizes,
    )  # fmt: skip
    kept = load(made.write())
    assert_close(kept.model, made.model)
    assert_close(kept.model, their_model(tmp_path))
    head, embedding = kept.model.get_output_embeddings(), kept.model.get_input_embeddings()
    if not READ:
        assert (head.weight is embedding.weight) == tied
    else:
        assert (stored_of(head) is stored_of(embedding)) == tied, "a tied weight is stored once"
        parameters = {id(p): p for p in kept.model.parameters() if p.dim() == 2}.values()
        assert all(p.untyped_storage().nbytes() == 4 for p in parameters), "float32 remains"


@pytest.mark.parametrize("of_bytes", [True, False])
def test_a_vocabulary_of_bytes_has_the_decoder_of_bytes(of_bytes: bool) -> None:
    """Grammars ask the decoder for the kind of the vocabulary. The text stays the same."""
    parts: list[Any] = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    parts += [decoders.ByteLevel()] if of_bytes else []
    tokens = ["Ġ", "h", "é", "Ã", "©", "▁"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(parts)
    before = backend.decode([1, 3, 4, 0, 1]), backend.to_str()
    decode_bytes(backend)
    assert backend.decode([1, 3, 4, 0, 1]) == before[0]
    assert (before[0] == "hé h") == of_bytes
    assert isinstance(backend.decoder, decoders.ByteLevel) == of_bytes
    assert of_bytes or backend.to_str() == before[1]


def test_the_end_token_is_that_of_the_file(tmp_path: Path) -> None:
    """Generation must not end at another token, such as the one that begins a text."""
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q8_0"])
    loaded = load(made.write())
    assert loaded.eos_token_ids == {loaded.model.config.eos_token_id}
    assert loaded.eos_token_ids == {loaded.tokenizer.eos_token_id}


def test_a_norm_that_the_file_has_plus_one(tmp_path: Path) -> None:
    """Gemma's norms multiply by 1 + weight, and its files have the sum."""
    kept = load(GgufModel(tmp_path / "a.gguf", "gemma3_text", ["Q8_0"]).write())
    assert_close(kept.model, their_model(tmp_path))


def test_a_type_that_no_kernel_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q8_0", "Q2_K", "F32"])
    kept = load(made.write())
    assert formats(kept.model) == {"Q8_0", "F32"} & READ, "a product has parts of both"
    assert "unpacked to float32: " in caplog.text and "of F32" not in caplog.text
    assert_close(kept.model, made.model)


def test_the_file_is_mapped(tmp_path: Path) -> None:
    kept = load(GgufModel(tmp_path / "a.gguf", "llama", ["Q4_1"]).write())
    maps = Path("/proc/self/maps").read_text()
    ranges = [line.split()[0] for line in maps.splitlines() if "stored.safetensors" in line]
    spans = [tuple(int(end, 16) for end in r.split("-")) for r in ranges]
    for module in with_stored(kept.model):
        for weight in stored_of(module):
            start = weight.data.data_ptr()
            assert any(a <= start and start + weight.nbytes <= b for a, b in spans)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q8_0"], tie_word_embeddings=False)
    files = split(made.write(), tmp_path)
    for file in files:
        assert_close(load(file).model, made.model)
    other = GgufModel(tmp_path / "b.gguf", "llama", ["Q8_0"], tie_word_embeddings=False)
    for parameter in other.model.parameters():
        parameter.data *= 2
    (tmp_path / "new").mkdir()
    os.replace(split(other.write(), tmp_path / "new")[1], files[1])
    changed = load(files[0]).model
    with pytest.raises(AssertionError, match="the logits differ"):
        assert_close(changed, made.model)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00002\.gguf is missing"):
        load(files[0])


def split(file: Path, folder: Path) -> list[Path]:
    """Split a file: the metadata and half of the tensors, and then the other tensors."""
    reader = gguf.GGUFReader(file)
    half, parts = len(reader.tensors) // 2, []
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:]), start=1):
        parts.append(folder / f"m-0000{number}-of-00002.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        for name, field in reader.fields.items():
            if number == 1 and not name.startswith("GGUF.") and name != "general.architecture":
                kind = field.types[0]
                sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), kind, sub_type=sub)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_frequencies_that_the_file_scales(tmp_path: Path) -> None:
    """Llama 3.1's files have factors for the frequencies of the rotary embedding."""
    factors = torch.linspace(1, 8, 32)
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q8_0"])
    file = made.write(lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy()))
    plain = logits(made.model)
    made.model.model.rotary_emb.inv_freq /= factors
    assert not torch.allclose(logits(made.model), plain)
    assert_close(load(file).model, made.model)


def scaled_positions(made: GgufModel) -> Path:
    def scaled(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)

    return made.write(scaled)


def infinite(made: GgufModel) -> Path:
    made.model.model.norm.weight.data[3] = torch.inf
    return made.write()


def too_wide(made: GgufModel) -> Path:
    layer = made.model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(torch.zeros(256, 544))
    return made.write()


def too_few(made: GgufModel) -> Path:
    del made.model.model.layers[1].mlp.down_proj
    return made.write()


def scale_of_infinity(made: GgufModel) -> Path:
    file = made.write()
    reader = gguf.GGUFReader(file, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight")
    tensor.data[5, :2] = np.array([0x7C00], dtype=np.uint16).view(np.uint8)
    return file  # now the reader ends, and writes the file


def cut_short(made: GgufModel) -> Path:
    file = made.write()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (scaled_positions, "rotary embedding .*yarn"),
        (infinite, r"infinite numbers in model\.norm\.weight"),
        (too_wide, r"other sizes for model\.layers\.1\.mlp\.down_proj"),
        (too_few, r"no weights for model\.layers\.1\.mlp\.down_proj"),
        (scale_of_infinity, r"infinite numbers in model\.layers\.1\.mlp\.up_proj"),
        (cut_short, r"a\.gguf could not be converted: it is damaged"),
    ],
)
def test_a_file_that_is_damaged_or_does_not_fit_its_model(
    tmp_path: Path, spoil: Callable[[GgufModel], Path], message: str
) -> None:
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q4_1"])
    with pytest.raises(ValueError, match=message):
        load(spoil(made))


def test_biases_that_the_model_would_leave_out_are_refused(tmp_path: Path) -> None:
    """transformers reads no biases of Llama's products: the answers would be wrong."""
    made = GgufModel(tmp_path / "a.gguf", "llama", ["Q8_0"], attention_bias=True)
    with pytest.raises(ValueError, match=r"blk\.0\.attn_\w+\.bias, which transformers leaves out"):
        load(made.write())


def test_a_file_of_another_byte_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufModel(tmp_path / "a.gguf", "llama", ["F16"]).write()
    read = gguf.GGUFReader.__init__

    def big(self: Any, *args: Any) -> None:
        read(self, *args)
        self.endianess = gguf.GGUFEndian.BIG

    monkeypatch.setattr(gguf.GGUFReader, "__init__", big)
    with pytest.raises(ValueError, match="byte order"):
        load(file)
