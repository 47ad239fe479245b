"""What each elective adds to the requests of a plan.

A grammar is also the list of all its strings, so that the expected answer needs no library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from common import (
    AgentHint,
    EngineConfig,
    LoadedModel,
    LoRARequest,
    PoolingParams,
    StructuredOutputsParams,
    load_model,
)

from ..instruments.random_adapter import shapes_of, write_adapter

ADAPTERS = (None, "A", "A", "B")  # two names, and requests without an adapter
VERSIONS = (0, 1)  # of each adapter
PRIORITIES = (0, 0, 1, -3, 7)
PAUSES = (None, 0.0, 1.0, 3600.0)  # seconds


@dataclass(frozen=True)
class Extra:
    """The part of a request that only one elective understands.

    sampling: more arguments of `SamplingParams`. arguments: more arguments of `add_request`.
    pooling: the request is for a vector.
    """

    sampling: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    pooling: PoolingParams | None = None

    @property
    def adapter(self) -> str | None:
        """The folder of the adapter."""
        wanted: LoRARequest | None = self.arguments.get("lora_request")
        return None if wanted is None else wanted.lora_path


PLAIN = Extra()


def _priority(chance: random.Random, model: str) -> Extra:
    return Extra(arguments={"priority": chance.choice(PRIORITIES)})


def _hint(chance: random.Random, model: str) -> Extra:
    """Return a hint of one of few conversations. Most of them are never released."""
    if chance.random() < 0.2:
        return _priority(chance, model)
    hint = AgentHint(
        f"talk {chance.randrange(4)}",
        expected_pause=chance.choice(PAUSES),
        ttl=chance.choice([None, None, 0.0, 86_400.0]),
        release=chance.random() < 0.1,
    )
    return Extra(arguments={"priority": chance.choice(PRIORITIES), "agent_hint": hint})


def _adapter(chance: random.Random, model: str) -> Extra:
    """Return a version of an adapter. The hash model has no linear layer that it could change."""
    name = chance.choice(ADAPTERS)
    if model == "hash" or name is None:
        return PLAIN
    folder = adapter_folder(model, f"{name}{chance.choice(VERSIONS)}")
    return Extra(arguments={"lora_request": LoRARequest(name, folder)})


def _vector(chance: random.Random, model: str) -> Extra:
    """Return a request for a vector. The hash model has no hidden states."""
    if model == "hash" or chance.random() < 0.5:
        return PLAIN
    params = PoolingParams(
        pooling_type=chance.choice(["LAST", "MEAN"]),
        normalize=chance.random() < 0.5,
        dimensions=chance.choice([None, None, 5]),
    )
    return Extra(pooling=params)


def _grammar(chance: random.Random, model: str) -> Extra:
    if find_spec("llguidance") is None or chance.random() < 0.4:
        return PLAIN
    wanted = chance.choice(list(GRAMMARS))
    return Extra(sampling={"structured_outputs": wanted, "ignore_eos": False})


EXTRAS: dict[str, Callable[[random.Random, str], Extra]] = {
    "priority": _priority,
    "agents": _hint,
    "lora": _adapter,
    "embedding": _vector,
    "structured_output": _grammar,
}
# The models of the schedules of an elective, if the hash model alone does not show what it adds.
TINY = ("tiny-llama", "tiny-qwen3")
MODELS = {
    "lora": ("hash", *TINY),
    "embedding": ("hash", *TINY),
    "hybrid_memory": ("hash", "tiny-gemma3_text", "tiny-qwen3_next"),
    "kv_quant": ("hash",),  # of other models, its answers are not Hugging Face's
}

_folder = TemporaryDirectory(prefix="soak-adapters-")


@cache
def adapter_folder(model: str, name: str) -> str:
    """Write a random adapter for all linear layers of a model. Return its folder."""
    plain = load_model(EngineConfig(model=model, device="cpu"), plain=True).model
    return write_adapter(Path(_folder.name, model, name), shapes_of(plain), seed=hash_of(name))


def hash_of(name: str) -> int:
    """Return a number for a name, the same in each process."""
    return int.from_bytes(name.encode(), "big")


def _json(*fields: str) -> tuple[StructuredOutputsParams, list[str]]:
    """Return a grammar of an object with boolean fields."""
    properties = {name: {"type": "boolean"} for name in fields}
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    values = product(("true", "false"), repeat=len(fields))
    texts = [", ".join(f'"{n}": {v}' for n, v in zip(fields, row, strict=True)) for row in values]
    wanted = StructuredOutputsParams(json={**schema, "additionalProperties": False})
    return wanted, [f"{{{text}}}" for text in texts]


def _regex(pattern: str, parts: Sequence[str], counts: range) -> Any:
    strings = ["".join(row) for count in counts for row in product(parts, repeat=count)]
    return StructuredOutputsParams(regex=pattern), strings


CHOICES = ["yes", "no", "not yet", "né 😀"]
# Each grammar, and all strings that it allows.
GRAMMARS: dict[StructuredOutputsParams, list[str]] = dict(
    [
        (StructuredOutputsParams(choice=CHOICES), CHOICES),
        _regex("[0-7]{1,3}", "01234567", range(1, 4)),
        _regex("(ab|cde|é){2,4}", ("ab", "cde", "é"), range(2, 5)),
        _json("a"),
        _json("a", "bc"),
    ]
)


class Preparation:
    """Prepares an engine for requests of its elective."""

    def __init__(self, engine: Any, waits: bool) -> None:
        """waits: for each grammar, so that a run does not depend on the time of a compilation."""
        self.engine = engine
        self.waits = waits
        self.versions: dict[str, LoRARequest] = {}  # of each adapter, the newest

    def before(self, extra: Extra) -> None:
        """Load a new version of an adapter, while requests may run with the old one."""
        lora: LoRARequest | None = extra.arguments.get("lora_request")
        if lora is not None and self.versions.setdefault(lora.lora_name, lora) != lora:
            self.versions[lora.lora_name] = lora
            self.engine.add_lora(lora)
        if self.waits and "structured_outputs" in extra.sampling:
            wait(
                [
                    self.engine.core.scheduler.grammars.compiler.submit(
                        extra.sampling["structured_outputs"]
                    )
                ]
            )


class GrammarAnswers:
    """The tokens that a grammar allows, computed from the list of its strings."""

    def __init__(self, loaded: LoadedModel) -> None:
        """The tokenizer must have a token for each byte, and no longer ones."""
        characters = [bytes_to_unicode()[byte] for byte in range(256)]
        tokens: Any = loaded.tokenizer.convert_tokens_to_ids(characters)
        self.token_of: list[int] = tokens  # by byte
        self.ends = sorted(loaded.eos_token_ids)
        self.texts = {
            wanted: [self.tokens_of(text) for text in strings]
            for wanted, strings in GRAMMARS.items()
        }

    def tokens_of(self, text: str) -> list[int]:
        return [self.token_of[byte] for byte in text.encode()]

    def allowed(self, wanted: StructuredOutputsParams, output: list[int]) -> list[int]:
        """Return the tokens that may follow an output, in order of their ids."""
        count = len(output)
        begun = [text for text in self.texts[wanted] if text[:count] == output]
        following = {text[count] for text in begun if len(text) > count}
        can_end = any(len(text) == count for text in begun)
        return sorted(following.union(self.ends if can_end else ()))
