"""Hunt for schemas and regular expressions that cost the engine's process much time or memory.

    python -m tests.helpers.grammar_hunt --count 2000

Another process tries each grammar first, with limits. What it lets through is compiled here, and a
random output of it is begun. The hunt measures both.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from common import EMBEDDED_MODEL, EngineConfig, LoadedModel, StructuredOutputsParams, load_model
from milestones.electives.structured_output.grammar import GrammarLibrary

STEPS = 12  # tokens of each output
ATOMS = (r"\w", r"\d", ".", "[a-z0-9_]", "(?:ab|a|b)", r"\s", "[^x]", r"(?:\w+\s?)", r"\p{L}", "é")
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
FORMATS = ("date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "time")


@dataclass
class Found:
    """What the hunt has found, in seconds and bytes of this process."""

    accepted: int = 0
    refused: int = 0
    compile_seconds: float = 0.0  # the longest time
    mask_seconds: float = 0.0
    bytes: int = 0  # the most that one grammar has taken
    worst: dict[str, str] = field(default_factory=dict)


def random_regex(chance: random.Random, depth: int = 0) -> str:
    """Return a regular expression that may be cheap or hopeless."""
    parts = []
    for _ in range(chance.randint(1, 4)):
        if depth < 4 and chance.random() < 0.4:
            parts.append(f"({random_regex(chance, depth + 1)})")
        else:
            parts.append(chance.choice(ATOMS))
        most = chance.choice([3, 10, 100, 2_000, 50_000])
        parts.append(chance.choice(["", "*", "+", "?", f"{{{chance.randint(0, most)},{most}}}"]))
    text = chance.choice(["", "|"]).join(parts) if depth else "".join(parts)
    return text * chance.choice([1, 1, 1, 20, 400]) if depth == 0 else text


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a JSON schema with keywords that may be expensive together."""
    kind = chance.choice(TYPES if depth < 4 else TYPES[:5])
    big = chance.choice([3, 50, 1_000, 99_999, 99_999_989])
    schema: dict[str, Any] = {"type": kind}
    if kind == "string":
        schema |= chance.choice([
            {}, {"maxLength": big}, {"minLength": chance.randint(0, big), "maxLength": big},
            {"pattern": random_regex(chance, 2)}, {"format": chance.choice(FORMATS)},
            {"pattern": random_regex(chance, 3), "maxLength": big},
        ])  # fmt: skip
    elif kind in ("integer", "number"):
        schema |= chance.choice([
            {}, {"minimum": -big, "maximum": big}, {"multipleOf": chance.randint(1, big)},
            {"multipleOf": chance.randint(1, big), "minimum": 1, "exclusiveMaximum": big * 7 + 3},
        ])  # fmt: skip
    elif kind == "array":
        schema |= {"items": random_schema(chance, depth + 1)}
        schema |= chance.choice([{}, {"maxItems": big}, {"minItems": big % 5_000}])
        if chance.random() < 0.3:
            prefix = random_schema(chance, depth + 1)
            schema["prefixItems"] = [prefix] * chance.choice([2, 50, 500])
    elif kind == "object":
        names = [f"p{i}" for i in range(chance.choice([1, 4, 12, 60] if depth < 2 else [1, 3]))]
        schema["properties"] = {name: random_schema(chance, depth + 1) for name in names}
        schema["required"] = chance.sample(names, chance.randint(0, len(names)))
        if chance.random() < 0.3:
            schema["patternProperties"] = {random_regex(chance, 3): {"type": "string"}}
        if chance.random() < 0.5:
            schema["additionalProperties"] = False
    if depth < 3 and chance.random() < 0.2:
        options = [
            random_schema(chance, depth + 1)
            for _ in range(chance.choice([2, 3, 20] if depth < 2 else [2]))
        ]
        return {chance.choice(["anyOf", "oneOf", "allOf"]): options}
    return schema


def random_grammar(chance: random.Random) -> StructuredOutputsParams | None:
    """Return parameters; None if they are refused before anything is compiled."""
    try:
        if chance.random() < 0.4:
            return StructuredOutputsParams(regex=random_regex(chance)[:90_000])
        schema = random_schema(chance)
        if chance.random() < 0.2:
            return StructuredOutputsParams(structural_tag=tag_of(chance, schema))
        if chance.random() < 0.2:
            schema = {"$defs": {"a": schema}, "anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
        return StructuredOutputsParams(json=schema)
    except ValueError:
        return None


def tag_of(chance: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural tag with many tools."""
    content = {"type": "json_schema", "json_schema": schema}
    tags = [
        {"begin": f"<tool_call>{i}", "content": content, "end": "</tool_call>"}
        for i in range(chance.choice([1, 5, 60]))
    ]
    form = {
        "type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags,
        "at_least_one": chance.random() < 0.5, "stop_after_first": chance.random() < 0.5,
    }  # fmt: skip
    return {"type": "structural_tag", "format": form}


def hunt(loaded: LoadedModel, count: int, seed: int) -> Found:
    """Compile random grammars, and begin an output of each."""
    library, found = GrammarLibrary(loaded), Found()
    process, chance = psutil.Process(), random.Random(seed)
    bits = np.zeros(-(-library.loaded.vocab_size // 32), np.int32)
    library(StructuredOutputsParams(choice=["a"]))  # starts the other process
    try:
        for _ in range(count):
            structured = random_grammar(chance)
            before = process.memory_info().rss
            try:
                if structured is None:
                    raise ValueError("refused at once")
                grammar = library(structured)
            except ValueError:
                found.refused += 1
                continue
            found.accepted += 1
            note(found, "compile_seconds", compile_again(library, structured), structured)
            for _ in range(STEPS):
                started = time.perf_counter()
                grammar.fill(bits)
                note(found, "mask_seconds", time.perf_counter() - started, structured)
                allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
                if len(allowed) == 0 or not grammar.accept(int(chance.choice(list(allowed)))):
                    break
            note(found, "bytes", process.memory_info().rss - before, structured)
    finally:
        library.close()
    return found


def compile_again(library: GrammarLibrary, structured: StructuredOutputsParams) -> float:
    """Return the seconds of a compilation in this process alone."""
    from dataclasses import asdict

    from milestones.electives.structured_output.grammar_compile import compile_grammar

    started = time.perf_counter()
    given = {**asdict(structured), "markers": library.markers}
    compile_grammar(library.tokenizer, given, library.loaded.eos_token_ids)
    return time.perf_counter() - started


def note(found: Found, name: str, value: float, structured: StructuredOutputsParams) -> None:
    """Keep the largest value, and its grammar."""
    if value > getattr(found, name):
        setattr(found, name, value)
        found.worst[name] = str(structured)[:500]


def main() -> None:
    """Hunt, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="its vocabulary is used")
    args = parser.parse_args()
    loaded = load_model(EngineConfig(model=args.model, device="cpu"))
    print(json.dumps(vars(hunt(loaded, args.count, args.seed)), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
