"""lora: answers are those of the merged model, and of m5 for requests without an adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common import EngineConfig, LoadedModel, LoRARequest, load_model
from common.fast.cpu_kernels import kernels
from milestones.chain import load
from milestones.electives.lora.peft_folder import read_adapter
from milestones.lab.instruments.fake_cuda import FakeCuda
from milestones.lab.instruments.random_adapter import merged_model, shapes_of, write_adapter
from milestones.lab.instruments.streams import LateStream
from tests.conftest import EngineFactory, ModuleOf, build_engine, plain_model, shared_model
from tests.helpers.oracle import assert_same_tokens, completions, generate, greedy
from tests.helpers.replaced import put_on_gpu

pytestmark = pytest.mark.since("lora")

MODEL = "tiny-llama"
FLOAT32 = 2e-5
PROMPTS = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [1, 2, 3], [40] * 20, [5, 6, 7, 8, 9], [9])
NAMES = (None, "A", "B", "A", "B", None)


def written(folder: Path, name: str, model: str = MODEL, **config: Any) -> LoRARequest:
    """Write an adapter for all linear layers of a model. Each name has its own matrices."""
    shapes = shapes_of(plain_model(model).model)
    return LoRARequest(name, write_adapter(folder / name, shapes, seed=ord(name), **config))


def merged(loaded: LoadedModel, request: LoRARequest) -> LoadedModel:
    return replace(loaded, model=merged_model(loaded.model, request.lora_path))


def serve(
    engine: Any,
    prompts: Sequence[list[int]],
    names: Sequence[str | None],
    adapters: Mapping[str, LoRARequest],
    max_tokens: int = 7,
) -> list[Any]:
    """Serve requests together. Return their completions, with log probabilities."""
    params = greedy(max_tokens, ignore_eos=True, logprobs=2)
    ids = [
        engine.add_request(prompt, params, lora_request=adapters[name] if name else None)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    finals = completions(engine)
    return [finals[name] for name in ids]


def assert_merged(
    found: list[Any],
    adapters: Mapping[str, LoRARequest],
    model: str = MODEL,
    prompts: Sequence[list[int]] = PROMPTS,
    names: Sequence[str | None] = NAMES,
) -> None:
    """I1: the tokens of each request are those of its merged model."""
    plain = plain_model(model)
    for completion, prompt, name in zip(found, prompts, names, strict=True):
        loaded = merged(plain, adapters[name]) if name else plain
        length = len(completion.token_ids)
        assert_same_tokens(generate(loaded, tuple(prompt), length), completion.token_ids)


def assert_merged_logits(found: Any, adapter: LoRARequest, tolerance: float) -> None:
    """I1: the log probabilities of a first token are those of the merged model."""
    expected = generate(merged(plain_model(MODEL), adapter), tuple(PROMPTS[0]), 1)
    for token, logprob in found.logprobs[0].items():
        assert logprob == pytest.approx(float(expected.logprobs[0, token]), abs=tolerance)


@pytest.mark.parametrize("passes", ["all", "none", "merge,norm,rotary,gate,layer,last"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3", "tiny-gpt_neox"])
def test_each_request_gets_the_answer_of_its_merged_model(
    make_engine: EngineFactory, tmp_path: Path, model: str, passes: str
) -> None:
    """Two ranks in one batch, with compiled layers, layers of torch, and Hugging Face's own."""
    adapters = {
        "A": written(tmp_path, "A", model),
        "B": written(tmp_path, "B", model, r=16, lora_alpha=4, use_rslora=True, size=0.2),
    }
    loaded = load_model(EngineConfig(model=model, device="cpu", model_passes=passes))
    engine = make_engine(loaded, page_size=2, max_num_batched_tokens=12, max_num_seqs=5)
    assert_merged(serve(engine, PROMPTS, NAMES, adapters), adapters, model)


def test_a_readable_engine_adds_in_torch(
    make_engine: EngineFactory, tmp_path: Path, module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiled kernel, a breakpoint stops in `add_grouped` in each linear layer."""
    adapters = {name: written(tmp_path, name, size=0.2) for name in "AB"}
    layers, calls = module_of("lora_layers"), [0]
    add_grouped = layers.add_grouped

    def counted(*arguments: Any) -> None:
        calls[0] += 1
        add_grouped(*arguments)

    monkeypatch.setattr(layers, "add_grouped", counted)
    engine = make_engine(plain_model(MODEL), readable=True, page_size=4)
    assert_merged(serve(engine, PROMPTS, NAMES, adapters), adapters)
    assert calls[0] == engine.stats().num_steps * len(shapes_of(engine.loaded.model))


@pytest.mark.skipif(kernels() is None, reason="only the compiled kernels give the same bits")
def test_a_base_request_has_the_bits_of_m5(make_engine: EngineFactory, tmp_path: Path) -> None:
    """Beside adapters, alone, and after them: tokens and log probabilities are equal."""
    adapters = {name: written(tmp_path, name) for name in "AB"}
    engine = make_engine(page_size=4)
    with build_engine("m5_overlap", page_size=4) as m5:
        alone = m5.generate([[*p] for p in PROMPTS], greedy(7, ignore_eos=True, logprobs=2))
    for names in (NAMES, (None,) * 6, ("A", None, "B", None, None, "A")):
        engine.reset_prefix_cache()
        for name, ours, theirs in zip(
            names, serve(engine, PROMPTS, names, adapters), alone, strict=True
        ):
            assert (ours == theirs.outputs[0]) == (name is None), name


@pytest.mark.skipif(kernels() is None, reason="only the compiled kernels give the same bits")
def test_a_request_has_the_same_bits_in_any_company(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    """I2: alone, among other adapters, in chunks of three tokens, and without overlap."""
    adapters = {name: written(tmp_path, name) for name in "AB"}
    engine = make_engine(page_size=4)
    together = serve(engine, PROMPTS, NAMES, adapters)
    for config in ({}, {"max_num_batched_tokens": 3}, {"enable_overlap": False, "max_loras": 1}):
        engine = make_engine(page_size=2, **config)
        found = [
            serve(engine, [prompt], [name], adapters)[0]
            for prompt, name in zip(PROMPTS, NAMES, strict=True)
        ]
        assert found == together, config


def test_a_slot_is_written_behind_the_step_that_reads_it(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    """One slot: B takes it in the plan of a step, while the last step of A is still to run."""
    adapters = {name: written(tmp_path, name) for name in "AB"}
    engine: Any = make_engine(page_size=4, max_loras=1)
    engine.core.runner.stream = LateStream()
    prompts, names = [PROMPTS[0]] * 3, ("A", "B", "A")
    found = serve(engine, prompts, names, adapters, 4)
    assert engine.core.scheduler.slots.num_loads >= 2
    assert_merged(found, adapters, MODEL, prompts, names)


@pytest.mark.parametrize("config", [{"lora_alpha": 16, "r": 8}, {"r": 9, "use_rslora": True}, {}])
def test_the_scale(make_engine: EngineFactory, tmp_path: Path, config: dict[str, Any]) -> None:
    """alpha / r, alpha / sqrt(r), and ranks and alphas of single layers. Logits, to 1e-5."""
    patterns: dict[str, Any] = {}
    if not config:
        q, down = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
        patterns = {
            "rank_pattern": {q: 2, r"1\.mlp\.down_proj": 7}, "ranks": {q: 2, down: 7},
            "alpha_pattern": {down: 21},
        }  # fmt: skip
    adapter = written(tmp_path, "A", **config, **patterns)
    (ours,) = serve(make_engine(), [PROMPTS[0]], ["A"], {"A": adapter}, 1)
    assert_merged_logits(ours, adapter, FLOAT32)


def test_a_shared_model_does_not_change(make_engine: EngineFactory, tmp_path: Path) -> None:
    """Engines with other adapters, and without, take turns on one model."""
    loaded = shared_model(MODEL)
    before = {name: {*vars(module)} for name, module in loaded.model.named_modules()}
    keys = [*loaded.model.state_dict()]
    adapters = {name: written(tmp_path, name) for name in "AB"}
    engines: list[Any] = [make_engine(page_size=2) for _ in range(2)]
    params = greedy(6, ignore_eos=True)
    with build_engine("m5_overlap", page_size=2) as m5:
        (expected,) = m5.generate([PROMPTS[0]], params)
        for engine, name in zip(engines, "AB", strict=True):
            engine.add_request(PROMPTS[0], params, name, lora_request=adapters[name])
        m5.add_request(PROMPTS[0], params, "m5")
        finals: dict[str, list[int]] = {}
        while len(finals) < 3:
            for engine in (*engines, m5):
                for output in engine.step():
                    finals[output.request_id] = (
                        output.outputs[0].token_ids if output.finished else []
                    )
            finals = {name: tokens for name, tokens in finals.items() if tokens}
    assert finals["m5"] == expected.outputs[0].token_ids
    for name in "AB":
        reference = generate(merged(plain_model(MODEL), adapters[name]), tuple(PROMPTS[0]), 6)
        assert_same_tokens(reference, finals[name])
    assert {name: {*vars(module)} for name, module in loaded.model.named_modules()} == before
    assert [*loaded.model.state_dict()] == keys


@pytest.mark.thorough("many captures on the fake device")
def test_graphs_with_adapters_and_without(
    make_engine: EngineFactory, module_of: ModuleOf, tmp_path: Path
) -> None:
    """The same size all base, mixed, only A, then B in A's slot: two graphs, rewritten in place."""
    adapters = {name: written(tmp_path, name) for name in "AB"}
    loaded = load_model(EngineConfig(model=MODEL, device="cpu"), plain=True)
    turns = ((None, None, None), (None, "A", None), ("A", "A", "A"), ("B", "B", "B"), (None,) * 3)
    prompts, engine = ([5, 6], [1, 2, 3], [4]), make_engine(loaded, max_loras=1, cuda_graph=False)
    expected = [serve(engine, prompts, names, adapters, 3) for names in turns]
    device = FakeCuda()
    with device.installed():
        gpu: Any = make_engine(loaded, attention_backend="triton", max_num_seqs=3, max_loras=1)
        gpu.core.runner.lora.kernels = None  # a GPU has the products of torch
        put_on_gpu(gpu, module_of("stream"))
        make_graphs, runner = module_of("cuda_graph").DecodeGraphs, gpu.core.runner
        max_pages = runner.inputs.page_table.shape[1]
        graphs = runner.graphs = make_graphs(runner.forward, [4], max_pages, capture=True)
        for names, theirs in zip(turns, expected, strict=True):
            ours = serve(gpu, prompts, names, adapters, 3)
            assert [x.token_ids for x in ours] == [x.token_ids for x in theirs], names
        captured = {(key.num_reqs, key.has_lora) for key in graphs.steps}
        assert captured == {(4, False), (4, True)}
        assert graphs.num_replays == device.names().count("replay side") >= 10


def test_bfloat16_adapters_agree_with_the_merged_model(
    make_engine: EngineFactory, tmp_path: Path
) -> None:
    """The scale is applied in float32, and then A and B get the dtype of the model."""
    adapter = written(tmp_path, "A", size=0.1)
    loaded = load_model(EngineConfig(model=MODEL, device="cpu", dtype="bfloat16"))
    (ours,) = serve(make_engine(loaded), [PROMPTS[0]], ["A"], {"A": adapter}, 1)
    assert_merged_logits(ours, adapter, 0.25)


def test_an_adapter_is_ready_to_be_copied_when_it_is_loaded(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would wait for a copy that changes the dtype, or that reads memory not pinned."""
    loaded = load_model(EngineConfig(model=MODEL, device="cpu", dtype="bfloat16"))
    engine: Any = make_engine(loaded)
    empty, pinned = torch.empty, set()

    def watched(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if pin_memory:
            pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    monkeypatch.setattr(engine.core.runner.lora, "on_gpu", True)
    monkeypatch.setattr(torch, "empty", watched)
    request = written(tmp_path, "A", r=3)
    adapter = engine.adapters.load(request)
    exact = read_adapter(request.lora_path, engine.core.runner.lora.shapes, 16)
    assert adapter.weights.keys() == exact.keys()
    for name, low_rank in adapter.weights.items():
        for ours, theirs in zip(low_rank, exact[name], strict=True):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs.bfloat16())
            assert ours.untyped_storage().data_ptr() in pinned
    assert len(pinned) == 1, "pinning takes long, so an adapter has one piece of memory"


@pytest.mark.extra("lora")
@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapters_that_peft_saved(
    make_engine: EngineFactory, tmp_path: Path, use_rslora: bool
) -> None:
    """PEFT writes the folder and merges the model; patterns have their own ranks and alphas."""
    from peft import LoraConfig, get_peft_model

    plain = plain_model(MODEL)
    config = LoraConfig(
        r=8, lora_alpha=16, use_rslora=use_rslora, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"layers.0.self_attn.q_proj": 3}, alpha_pattern={"down_proj": 5},
    )  # fmt: skip
    adapted = get_peft_model(copy.deepcopy(plain.model), config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(str(tmp_path / "peft"))
    whole = replace(plain, model=adapted.merge_and_unload())  # type: ignore[arg-type]
    request = {"P": LoRARequest("P", str(tmp_path / "peft"))}
    names = [name and "P" for name in NAMES]
    found = serve(make_engine(), PROMPTS, names, request)
    for completion, prompt, adapter in zip(found, PROMPTS, names, strict=True):
        reference = generate(whole if adapter else plain, tuple(prompt), 7)
        assert_same_tokens(reference, completion.token_ids)


def test_products_row_by_row_and_in_groups() -> None:
    """The compiled kernel, groups of rows and masked products agree; slot 0 adds nothing."""
    layers = load("lora", "lora_layers")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 5, n, generator=generator) for n in (24, 40))
    a[0] = b[0] = a[2, 2:] = b[2, 2:] = 0
    weights = layers.SlotWeights(a, b, torch.tensor([0, 5, 2]))
    x, y = torch.randn(7, 24, generator=generator), torch.randn(7, 60, generator=generator)
    slots = [0, 2, 1, 1, 0, 2, 1]
    expected = y.clone()
    for row, slot in enumerate(slots):
        expected[row, 3:43] += b[slot].T @ (a[slot] @ x[row])
    index, groups = torch.tensor(slots), layers.group_rows(slots)
    assert [(slot, rows.tolist()) for slot, rows in groups] == [(2, [1, 5]), (1, [2, 3, 6])]
    found = [y.clone() for _ in range(3)]
    layers.add_grouped(x, found[0][:, 3:43], weights, groups)
    layers.add_masked(x, found[1][:, 3:43], weights, index)
    if (compiled := kernels()) is not None:
        compiled.add_low_rank(x, found[2][:, 3:43], index, weights.ranks, a, b)
        alone = y[1:2].clone()
        compiled.add_low_rank(x[1:2], alone[:, 3:43], index[1:2], weights.ranks, a, b)
        assert torch.equal(alone, found[2][1:2]), "I2: a row has the same bits alone"
    for ours in found[: 2 + (compiled is not None)]:
        assert torch.allclose(ours, expected, atol=FLOAT32)
        assert torch.equal(ours[0], y[0]) and torch.equal(ours[4], y[4])
