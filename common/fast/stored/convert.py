"""Convert a GGUF file: its weights as stored weights, under the names of Hugging Face.

transformers knows which tensor of a GGUF file is which weight of a model, and what has to be done
with its numbers: the rows of q and k of Llama are in another order, and 1 was added to the norms of
Gemma. A weight stays as it is stored if only its rows move. Any other weight becomes float32.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .formats import FORMATS
from .gguf import BLOCKS
from .modules import can_keep, narrow_of
from .weight import StoredWeight

logger = logging.getLogger(__name__)

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
TIED = ("falcon", "bloom")  # the head is tied in these architectures, although the file has it
# A bias or a norm of a layer: a model that leaves it out gives other answers.
ADDED = re.compile(r"blk\.(\d+)\.(.*\.bias|.*norm\.weight)")
FREQUENCIES = "rope_freqs.weight"  # factors of the rotary frequencies (Llama 3.1)
Named = tuple[str, "StoredWeight | torch.Tensor"]


def config_of(gguf: Path) -> PretrainedConfig:
    """Return the configuration of the model in a GGUF file."""
    source, file = gguf.parent, gguf.name
    return AutoConfig.from_pretrained(source, gguf_file=file, trust_remote_code=False)


def shards_of(gguf: Path) -> list[Path]:
    """Return all files of a model: a large one is split into `<name>-00001-of-00003.gguf`, ....

    Raises `ValueError` that names a missing file.
    """
    if (match := SHARD.fullmatch(gguf.name)) is None:
        return [gguf]
    name, _, count = match.groups()
    files = [gguf.with_name(f"{name}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing: {gguf.name} is one of {int(count)} files")
    return files


def empty_model(config: PretrainedConfig) -> Any:
    """Return a model without memory for its parameters (device `meta`); its buffers are on CPU."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def converted_weights(
    gguf: Path, config: PretrainedConfig, panel_size: int, advance: Callable[[float], None]
) -> Iterator[Named]:
    """Iterate over the weights of a GGUF model, with their names in Hugging Face's model.

    advance: a function that is told the fraction of the tensors that are done.

    Raises `ValueError` for what cannot be read.
    """
    from gguf import GGUFEndian, GGUFReader

    readers = [GGUFReader(file) for file in shards_of(gguf)]
    if any(reader.endianess != GGUFEndian.LITTLE for reader in readers):
        raise ValueError("its numbers have the byte order of another kind of machine")
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    _set_tied(config, [tensor.name for tensor in tensors])
    model = empty_model(config)
    names = _Names(gguf, readers[0], model)
    _require_known_rotation(readers[0], config)
    kinds = {f"{name}.weight" for name, module in model.named_modules() if can_keep(module)}
    unpacked: Counter[str] = Counter()
    for index, tensor in enumerate(tensors):
        advance(index / len(tensors))
        target = names.of(tensor.name) or ""
        if target in kinds:
            stored = _stored(tensor, target, names, panel_size)
            if stored is not None:
                yield target, stored
                continue
            if tensor.tensor_type.name != "F32":
                unpacked[tensor.tensor_type.name] += 1
        for name, weight in names.processed(tensor.name, _floats(tensor)):
            _require_finite(name, weight.numpy())
            yield name, weight
    yield from names.collected()
    if unpacked:
        said = ", ".join(f"{count} of {name}" for name, count in sorted(unpacked.items()))
        logger.warning("%s: weights that are unpacked to float32: %s", gguf, said)


class _Names:
    """What transformers knows about the tensors of a GGUF file."""

    def __init__(self, gguf: Path, reader: Any, model: Any) -> None:
        """Raises `ValueError` for an architecture that transformers does not know."""
        from transformers import modeling_gguf_pytorch_utils as known

        self.parsed = known.load_gguf_checkpoint(str(gguf), return_tensors=False)
        self.parsed["tensors"] = {}
        architecture = _field(reader, "general.architecture")
        kind = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)
        self.processor = kind(config=self.parsed["config"])
        self.names: dict[str, str] = known.get_gguf_hf_weights_map(model, self.processor)
        self.num_layers: int = model.config.get_text_config().num_hidden_layers

    def of(self, name: str) -> str | None:
        """Return the name of a tensor in Hugging Face's model; None if it has no single name."""
        return self.names.get(name)

    def process(self, name: str, weights: NDArray[Any]) -> tuple[str | None, NDArray[Any]]:
        """Return a tensor as Hugging Face's model has it, and its name in the GGUF file."""
        done = self.processor.process(
            weights=weights, name=name, tensor_key_mapping=self.names,
            parsed_parameters=self.parsed,
        )  # fmt: skip
        return done.name, done.weights

    def processed(
        self, name: str, weights: NDArray[np.float32]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights that a tensor of the file becomes: one, or none so far."""
        done, weights = self.process(name, weights)
        if done == FREQUENCIES:
            yield FREQUENCIES, torch.from_numpy(np.copy(weights))
        elif done is not None and (target := self.names.get(done)) is not None:
            yield target, torch.from_numpy(np.copy(weights))
        elif (found := ADDED.fullmatch(name)) is not None and int(found[1]) < self.num_layers:
            raise ValueError(f"it has {name}, which transformers leaves out of a model of its kind")
        elif done is not None:
            logger.warning("the model does not use the tensor %s of its file", name)

    def collected(self) -> Iterator[Named]:
        """Iterate over the weights that several tensors became together."""
        yield from self.parsed["tensors"].items()

    def order_of(self, name: str, rows: int) -> NDArray[np.int64] | None:
        """Return the order in which Hugging Face's model has the rows of a tensor.

        None if more than its rows changes. The function that transformers applies to the numbers
        is applied to the numbers of the rows.
        """
        numbers = np.repeat(np.arange(rows, dtype=np.float64)[:, None], 2, axis=1)
        done, moved = self.process(name, numbers)
        if done != name or moved.shape != (rows, 2) or not np.array_equal(*moved.T):
            return None
        order = moved[:, 0].astype(np.int64)
        whole = np.array_equal(np.sort(moved[:, 0]), np.arange(rows))
        return order if whole else None


def _stored(tensor: Any, target: str, names: _Names, panel_size: int) -> StoredWeight | None:
    """Return a tensor of a GGUF file as it is stored, with its rows in order; None if it cannot."""
    if tensor.data.ndim != 2 or (order := names.order_of(tensor.name, len(tensor.data))) is None:
        return None
    kind, rows = tensor.tensor_type.name, tensor.data[order]
    if kind in ("F16", "BF16", "F32"):
        floats = torch.from_numpy(rows)
        floats = floats.view(torch.bfloat16) if kind == "BF16" else floats
        _require_finite(target, floats.float().numpy())
        narrow = narrow_of(floats)
        return None if narrow is None else StoredWeight.of_floats(narrow, panel_size)
    if kind not in BLOCKS:
        return None
    inputs = int(tensor.shape[0])
    quanta = BLOCKS[kind](rows.reshape(len(rows), inputs // FORMATS[kind].block, -1))
    _require_finite(target, quanta.scales, quanta.minimums)
    return StoredWeight.of_quanta(quanta, FORMATS[kind], panel_size)


def _require_finite(name: str, *numbers: NDArray[Any] | None) -> None:
    """Raise `ValueError` if a weight contains NaN or infinite numbers."""
    if not all(np.isfinite(found).all() for found in numbers if found is not None):
        raise ValueError(f"it has NaN or infinite numbers in {name}")


def _floats(tensor: Any) -> NDArray[np.float32]:
    from gguf import dequantize

    return dequantize(tensor.data, tensor.tensor_type)


def _field(reader: Any, name: str) -> Any:
    """Return a value from the metadata of a GGUF file; None if there is none."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _require_known_rotation(reader: Any, config: PretrainedConfig) -> None:
    """Raise `ValueError` if positions are scaled in a way that transformers has not read."""
    scaling = _field(reader, f"{_field(reader, 'general.architecture')}.rope.scaling.type")
    if scaling not in (None, "none") and rotation_of(config) == "default":
        raise ValueError(f"transformers does not read its rotary embedding (scaling {scaling!r})")


def rotation_of(config: PretrainedConfig) -> str:
    """Return the kind of a model's rotary embedding; `default` if it is not scaled."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return str(parameters.get("rope_type", "default"))


def scale_rotation(model: Any, factors: torch.Tensor) -> None:
    """Divide the frequencies of the rotary embedding by the factors of the file (Llama 3.1)."""
    if rotation_of(model.config) != "default":
        return  # transformers has read how they are scaled
    for module in model.modules():
        if isinstance(frequencies := getattr(module, "inv_freq", None), torch.Tensor):
            frequencies.div_(factors)


def _set_tied(config: PretrainedConfig, names: list[str]) -> None:
    """Say in a configuration whether the head is tied: whether no file of the model has one."""
    if config.model_type not in TIED:
        config.tie_word_embeddings = "output.weight" not in names
