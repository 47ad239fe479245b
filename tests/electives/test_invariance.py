"""The elective `invariance`: exact orders are exact, and each broken one is caught."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import product as pairs
from typing import Any

import pytest
import torch

from common import EngineConfig, LLMEngine, LoadedModel
from common.fast.cpu_kernels import kernels
from milestones.chain import ROOT, load
from milestones.electives.invariance import split_attention as split
from milestones.electives.invariance import sums
from milestones.electives.invariance.first_difference import (
    Recording,
    first_difference,
    recording,
)
from milestones.electives.invariance.variants import VARIANTS
from milestones.lab.instruments.audit import audited_engine_class
from milestones.lab.instruments.paged_case import PagedCase
from tests import conftest
from tests.conftest import plain_model, shared_model
from tests.engine.test_prompt_logprobs import test_chunks_change_no_bit as chunks_change_no_bit
from tests.helpers.oracle import assert_one_answer, drain, greedy
from tests.invariants import test_i2_batch_invariance as i2

pytestmark = [pytest.mark.since("invariance"), pytest.mark.cpu]

FIXED = [name for name, variant in VARIANTS.items() if not variant.depends_on]
BROKEN = [name for name in VARIANTS if name not in FIXED]
SUITE: dict[str, Callable[..., None]] = {
    "test_company_changes_no_bit": i2.test_company_changes_no_bit,
    "test_a_cached_prefix_changes_no_bit": i2.test_a_cached_prefix_changes_no_bit,
    "test_chunks_change_no_bit": chunks_change_no_bit,
}
needs_kernels = pytest.mark.skipif(kernels() is None, reason="`exact` needs the kernels in C")


def made(variant: str, model: str = "tiny-llama", **config: Any) -> LLMEngine:
    """Return an audited engine of a variant, on a shared model."""
    loaded: LoadedModel = (shared_model if variant == "exact" else plain_model)(model)
    own = audited_engine_class("invariance", conftest.MODE)
    config = {"enable_overlap": conftest.MODE != "serial", **config}

    class Engine(own):  # type: ignore[misc, valid-type]
        def make_core(self) -> Any:
            self.variant = VARIANTS[variant]
            return super().make_core()

    readable = variant != "exact"
    return Engine(EngineConfig(model=model, device="cpu", readable=readable, **config), loaded)


def run(test: Callable[..., None], variant: str) -> None:
    """Run a test of the shared suite on a variant."""
    engines: list[LLMEngine] = []

    def make_engine(**config: Any) -> LLMEngine:
        engines.append(made(variant, **config))
        return engines[-1]

    try:
        test(make_engine)
    finally:
        for engine in engines:
            engine.close()


def table() -> dict[str, list[bool]]:
    """Return the handout's table of the tests that catch a variant."""
    text = (ROOT / "milestones/electives/invariance/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (yes|-) \| (yes|-) \| (yes|-) \|$", text, re.MULTILINE)
    return {name: [cell == "yes" for cell in cells] for name, *cells in rows}


def test_the_table_has_all_variants() -> None:
    assert list(table()) == list(VARIANTS)
    assert not any(any(table()[name]) for name in FIXED)
    assert all(any(table()[name]) for name in BROKEN), "a broken engine that no test catches"


@pytest.mark.parametrize(("name", "number"), [*pairs(VARIANTS, range(3))])
def test_the_suite_catches_the_broken_engines(name: str, number: int) -> None:
    """Which of the three tests of bits go red is what the table of the handout says."""
    if name == "exact" and kernels() is None:
        pytest.skip("`exact` needs the kernels in C")
    test = [*SUITE.values()][number]
    if table()[name][number]:
        with pytest.raises(AssertionError):
            run(test, name)
    else:
        run(test, name)


@pytest.mark.parametrize("name", [*VARIANTS])
def test_every_variant_gives_the_answer(name: str) -> None:
    """I1: also the broken ones, up to ties. Sums in bfloat16 are too coarse for this test."""
    if name.endswith("bf16"):
        pytest.skip("it computes another model")
    engine = made(name, max_num_batched_tokens=7)
    prompts = [[1, 2, 3], [*range(40)], [9]]
    for output in engine.generate(prompts, greedy(12)):
        assert_one_answer("tiny-llama", output, 12)
    engine.close()


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant must be one of exact, fixed"):
        load("invariance").LLMEngine(EngineConfig(model="tiny-llama"), variant="slow")


def test_a_variant_needs_the_models_own_lines() -> None:
    """Passes would compute the operations that a variant replaces."""
    config = EngineConfig(model="tiny-llama", device="cpu")
    with pytest.raises(ValueError, match="readable"):
        load("invariance").LLMEngine(config, shared_model("tiny-llama"), variant="fixed")


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 259), (576, 192), (1536, 576), (24, 8)])
def test_a_fixed_product_does_not_see_the_other_rows(inputs: int, outputs: int) -> None:
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(40, inputs, generator=chance)
    weight = torch.randn(outputs, inputs, generator=chance)
    whole = sums.fixed_product(x, weight)
    for first, count in ((0, 1), (7, 1), (3, 9), (11, 16), (39, 1)):
        rows = x[first : first + count]
        assert torch.equal(sums.fixed_product(rows, weight), whole[first : first + count])
    exact = x.double() @ weight.double().T
    for product in (sums.fixed_product, sums.product_by_rows):
        assert (product(x, weight) - exact).abs().max() < 1e-5 * inputs
    assert sums.fixed_product(x[:0], weight).shape == (0, outputs)


def test_parts_change_the_bits_and_not_the_value() -> None:
    x = torch.randn(1, 3, 256, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    found = [sums.split_product(x, weight, num_parts=n) for n in (1, 2, 8)]
    assert all(torch.allclose(found[0], other, atol=1e-4) for other in found)
    assert not torch.equal(found[0], found[2]), "the order of a sum decides its last bits"


CASES = [([1], [1]), ([40, 17, 33], [1, 1, 1]), ([5, 40, 16], [1, 9, 16]), ([64, 31], [64, 2])]


@pytest.mark.parametrize(("contexts", "counts"), CASES, ids=str)
@pytest.mark.parametrize("name", ["fixed", "split_kv", "split_at_chunk"])
def test_split_attention_equals_float64(name: str, contexts: list[int], counts: list[int]) -> None:
    case = PagedCase(load("invariance", "attention"), contexts, counts)
    assert case.error(VARIANTS[name].attention) < case.tolerance


def test_a_split_holds_each_position_once() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        context = drawn.randint(1, 90)
        first, num_requests = drawn.randrange(context), drawn.randint(1, 20)
        for function in (split.fixed_split, split.split_by_batch, split.split_at_chunk):
            found = function(context, first, num_requests)
            seen = [p for p in found.flatten().tolist() if p < context]
            assert seen == [*range(context)], function.__name__


def test_a_recording_names_the_operation_that_differs() -> None:
    """The first one of the earliest position, wherever the later ones differ most."""
    expected = {
        "split_norm": "input_layernorm", "split_kv": "o_proj (input)", "fixed": None,
        "split_k": "lm_head", "split_at_chunk": "o_proj (input)", "fixed_bf16": None,
    }  # fmt: skip
    for name, operation in expected.items():
        found = first_difference(*(recorded(name, count) for count in (0, 5)))
        ends = found.operation.rpartition("layers.")[2].split(".")[-1] if found else None
        ends = ends.replace("post_attention_", "input_") if ends else None  # either of the norms
        assert ends == operation, f"{name}: {found}"


def recorded(name: str, num_others: int) -> Recording:
    engine = made(name, enable_overlap=False, max_num_batched_tokens=512 if not num_others else 8)
    with recording(engine, "asked") as found:  # type: ignore[arg-type]
        for number in range(num_others):
            engine.add_request([number + 1] * (3 + number), greedy(30))
        engine.add_request([*range(20)], greedy(6), "asked")
        drain(engine)
    engine.close()
    return found


def test_a_recording_leaves_no_hook() -> None:
    """Hugging Face's own stay: a model that was asked for hidden states has some."""
    engine: Any = made("fixed", enable_overlap=False)

    def hooks() -> list[Any]:
        modules = list(engine.loaded.model.modules())
        return [(*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for m in modules]

    before = hooks()
    with recording(engine, "a"):
        assert hooks() != before
        engine.add_request([1, 2], greedy(2), "a")
        drain(engine)
    assert "prepare" not in vars(engine.core.runner)
    assert hooks() == before
    engine.close()
