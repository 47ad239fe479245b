"""lora: folders in PEFT's format that are refused, each alone, with an error that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import EngineConfig, LoRARequest
from milestones.electives.lora.peft_folder import NEUTRAL, read_adapter
from milestones.lab.instruments.random_adapter import PREFIX
from tests.conftest import EngineFactory, ModuleOf
from tests.electives.test_lora_answers import written
from tests.helpers.oracle import drain, greedy

pytestmark = pytest.mark.since("lora")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
HEAD = f"{PREFIX}lm_head"
Damage = Callable[[Path], Any]


def config(**values: Any) -> Damage:
    """Return a function that changes the configuration of an adapter."""

    def change(folder: Path) -> None:
        known = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(known | values))

    return change


def tensors(**values: torch.Tensor | None) -> Damage:
    """Return a function that changes tensors of an adapter; None removes one."""

    def change(folder: Path) -> None:
        found = {**load_file(folder / WEIGHTS), **values}
        save_file({k: v for k, v in found.items() if v is not None}, folder / WEIGHTS)

    return change


def truncate(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def nan() -> torch.Tensor:
    return torch.full((4, 64), torch.nan)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (truncate, "cannot read .*safetensors"),
    "a pickle": (pickle, "adapter_model.bin is not read: only safetensors"),
    "no configuration": (lambda f: (f / CONFIG).unlink(), "cannot read .*adapter_config.json"),
    "no object": (lambda f: (f / CONFIG).write_text("[1]"), "must be an object"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "cannot read .*config.json"),
    "another method": (config(peft_type="IA3"), "peft_type='IA3' is not supported"),
    "DoRA": (config(use_dora=True), "use_dora=True is not supported"),
    "bias": (config(bias="lora_only"), "bias='lora_only' is not supported"),
    "a saved head": (config(modules_to_save=["lm_head"]), "modules_to_save=.* is not supported"),
    "a bias of A and B": (config(lora_bias=True), "lora_bias=True is not supported"),
    "transposed": (config(fan_in_fan_out=True), "fan_in_fan_out=True is not supported"),
    "QALoRA": (config(use_qalora=True), "use_qalora=True is not supported"),
    "layers twice": (config(layer_replication=[[0, 2], [1, 2]]), "layer_replication=.* is not"),
    "tokens": (config(trainable_token_indices=[5]), r"trainable_token_indices=\[5\] is not"),
    "parameters": (config(target_parameters=["w"]), r"target_parameters=\['w'\] is not supported"),
    "aLoRA": (config(alora_invocation_tokens=[1]), r"alora_invocation_tokens=\[1\] is not"),
    "PiSSA": (config(init_lora_weights="pissa"), "init_lora_weights='pissa' is not supported"),
    "rank 17": (config(r=17), "has rank 17; max_lora_rank is 16"),
    "rank of a layer": (config(rank_pattern={"q_proj": 40}), "has rank 40; max_lora_rank is 16"),
    "no rank": (config(r=None), "r must be a positive number, got None"),
    "alpha": (config(lora_alpha="8"), "lora_alpha must be a positive number, got '8'"),
    "alpha of a layer": (config(alpha_pattern={"q_proj": "x"}), "alpha_pattern has 'x' for"),
    "alpha that no float holds": (
        config(alpha_pattern={"q_proj": 10**400}), "alpha_pattern has 1000+.* for"
    ),
    "a pattern": (config(rank_pattern={"(": 4}), r"rank_pattern has '\('"),
    "another rank": (config(r=5), r"lora_A of .* must be \(5, 128\), got \(4, 128\)"),
    "shape": (tensors(**{f"{Q}.lora_A.weight": torch.zeros(4, 65)}), r"must be \(4, 64\)"),
    "integers": (tensors(**{f"{Q}.lora_A.weight": torch.ones(4, 64).int()}), "torch.int32"),
    "8 bits": (
        tensors(**{f"{Q}.lora_A.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}), "float8"
    ),
    "infinite with its scale": (
        tensors(**{f"{Q}.lora_B.weight": torch.full((64, 4), 3e38)}), "lora_B .* not finite"
    ),
    "not a number": (tensors(**{f"{Q}.lora_A.weight": nan()}), "numbers that are not finite"),
    "only A": (tensors(**{f"{Q}.lora_B.weight": None}), "q_proj has only lora_A"),
    "magnitudes": (tensors(**{f"{Q}.lora_magnitude_vector": torch.ones(64)}), "magnitude_vector"),
    "no such layer": (
        tensors(**{f"{PREFIX}model.layers.9.q_proj.lora_A.weight": torch.ones(4, 64)}),
        "layers.9.q_proj.* belongs to no linear layer of this model",
    ),
    "the head": (
        tensors(**{f"{HEAD}.lora_A.weight": torch.ones(4, 64)}), "lm_head.* no linear layer"
    ),
}  # fmt: skip


# Settings of PEFT that change no answer, or only through the tensors of the file.
HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "layers_to_transform",
    "layers_pattern", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "qalora_group_size",
}  # fmt: skip
COMPUTED = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}


@pytest.mark.extra("lora")
def test_every_setting_of_peft_is_known(milestone: str) -> None:
    """A new setting is computed, refused, or found to be harmless. It is never just ignored."""
    from dataclasses import fields

    from peft import LoraConfig

    unknown = {field.name for field in fields(LoraConfig)} - NEUTRAL.keys() - HARMLESS - COMPUTED
    assert not unknown, "does it change what an adapter computes? Then refuse it in NEUTRAL"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_file_of_any_precision_is_read_exactly(
    milestone: str, tmp_path: Path, dtype: torch.dtype
) -> None:
    """The stored numbers become float32, and the scale is applied after that."""
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(3, 8, generator=generator), torch.randn(6, 3, generator=generator)
    stored = {"A": a.to(dtype), "B": b.to(dtype)}
    save_file({f"{Q}.lora_{k}.weight": v for k, v in stored.items()}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 1}))
    name = Q.removeprefix(PREFIX)
    (found,) = read_adapter(str(tmp_path), {name: (8, 6)}, 16).values()
    assert found.a.dtype == found.b.dtype == torch.float32
    assert torch.equal(found.a, stored["A"].float())
    assert torch.equal(found.b, (stored["B"].float() * (1 / 3)).T)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good adapter, which requests use while others are refused."""
    return Path(written(tmp_path_factory.mktemp("good"), "A").lora_path)


def test_a_bad_folder_is_refused_alone(
    make_engine: EngineFactory, tmp_path: Path, running: Path
) -> None:
    """I4: the registry, the slots and the running request are as they were after each of them."""
    engine: Any = make_engine()
    good = LoRARequest("good", str(running))
    (expected,) = drain_one(engine, good)
    name = engine.add_request([5, 6, 7], greedy(40, ignore_eos=True), lora_request=good)
    engine.step()
    for number, (what, (damage, message)) in enumerate(DAMAGES.items()):
        folder = Path(written(tmp_path / str(number), "A").lora_path)
        damage(folder)
        before = (
            engine.list_loras(),
            engine.adapters.num_loads,
            {**engine.core.scheduler.slots.resident},
        )
        for call in (
            lambda f=folder: engine.add_request([1], lora_request=LoRARequest("bad", str(f))),
            lambda f=folder: engine.add_lora(LoRARequest("good", str(f))),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        after = (
            engine.list_loras(),
            engine.adapters.num_loads,
            {**engine.core.scheduler.slots.resident},
        )
        assert after == before, what
        assert engine.step(), "the running request goes on"
    assert drain(engine)[name][-1].outputs[0].token_ids[:3] == expected


def drain_one(engine: Any, adapter: LoRARequest) -> list[list[int]]:
    name = engine.add_request([5, 6, 7], greedy(3, ignore_eos=True), lora_request=adapter)
    return [drain(engine)[name][-1].outputs[0].token_ids]


def test_a_folder_that_does_not_exist(make_engine: EngineFactory, tmp_path: Path) -> None:
    engine: Any = make_engine()
    with pytest.raises(ValueError, match="cannot read"):
        engine.add_request([1], lora_request=LoRARequest("A", str(tmp_path / "none")))
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("values", [("", "x"), ("a", ""), ("a", "x\0"), (1, "x"), ("a", None)])
def test_a_wrong_lora_request(milestone: str, values: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="lora_"):
        LoRARequest(*values)


@pytest.mark.parametrize("field", ["max_loras", "max_lora_rank"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, 2**20])
def test_a_wrong_limit(milestone: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: value})


@pytest.mark.since("m1_single")
@pytest.mark.before("lora")
def test_an_engine_without_adapters_refuses_the_argument(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    with pytest.raises(TypeError, match="lora_request"):
        engine.add_request([1], lora_request=LoRARequest("A", "x"))
    assert not engine.has_unfinished_requests()


def test_numbers_that_are_too_large_for_the_model_are_refused(module_of: ModuleOf) -> None:
    """In float16, 70,000 is infinite, and an infinite number would reach all rows of a step."""
    layers: Any = SimpleNamespace(dtype=torch.float16, on_gpu=False)
    stage, low_rank = module_of("lora_layers").LoRALayers.stage, module_of("peft_folder").LowRank
    small, large = torch.ones(2, 3), torch.full((2, 3), 7e4)
    assert stage(layers, {"q": low_rank(small, small)})["q"].a.dtype == torch.float16
    with pytest.raises(ValueError, match="too large for torch.float16: use another dtype"):
        stage(layers, {"q": low_rank(small, large)})
