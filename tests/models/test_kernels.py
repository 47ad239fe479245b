"""The Triton kernels without a GPU.

They are interpreted and compared with the torch version in float64, and compiled for real GPUs.
"""

from __future__ import annotations

import json
import random
from bdb import BdbQuit
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from common.hf import kernel_trial
from common.hf.probe import LayerKV
from milestones.chain import load, package
from milestones.lab.instruments.paged_case import PagedCase
from tests.conftest import EngineFactory
from tests.helpers.compile_kernels import ALONE, GROUP, UNUSUAL
from tests.helpers.compile_report import compile_report
from tests.helpers.process import run_python

triton = pytest.importorskip("triton", reason="Triton is for Linux")
# Bytes of shared memory that a program may use, by compute capability.
SHARED_MEMORY = {kind: kib * 1024 for kind, kib in (
    (75, 64), (80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99),
)}  # fmt: skip
FEW_BYTES = 32  # eight registers of a kernel: some shapes and versions of Triton spill so many

pytestmark = [
    pytest.mark.since("m3_paged"),
    pytest.mark.only_of("attention.py", "kernels.py", "triton_ops.py"),
]


@pytest.fixture(scope="session")
def interpreted(milestone: str) -> ModuleType:
    """The launchers of the kernels. `tests.conftest` turns Triton's interpreter on."""
    return load(milestone, "triton_ops")


def check(case: PagedCase, interpreted: ModuleType) -> None:
    assert (error := case.error(interpreted)) < case.tolerance, f"relative error {error:.2e}"


def dense(case: PagedCase) -> torch.Tensor:
    """Compute attention by its textbook formula, one request at a time, in float64."""
    meta, outputs = case.meta, []
    keys, values = case.keys.double(), case.values.double()
    case.attention.store_kv(keys, values, case.key.double(), case.value.double(), meta)
    for row, (context, count) in enumerate(
        zip(meta.seq_lens_cpu, meta.query_lens_cpu, strict=True)
    ):
        start = int(meta.query_start_loc[row])
        positions = torch.arange(context)
        pages = meta.page_table[row, positions // meta.page_size].long()
        slots = pages * meta.page_size + positions % meta.page_size
        group = case.query.shape[1] // keys.shape[0]
        k, v = (m.flatten(1, 2)[:, slots].repeat_interleave(group, 0) for m in (keys, values))
        q = case.query[start : start + count].double().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * 0.25
        seen = positions <= torch.arange(context - count, context)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


EDGES = [  # contexts and new tokens of the requests, at page edges and one token off
    ([1], [1]),
    ([1, 3, 4, 5, 8], [1, 1, 1, 1, 1]),
    ([4, 5, 3], [4, 5, 3]),
    ([9, 8, 7], [4, 4, 4]),
    ([1, 255, 256, 257, 513], [1, 1, 1, 1, 1]),
    ([7, 16, 70, 2, 65], [1, 1, 70, 2, 3]),
    ([300, 5], [2, 5]),
]


# One for each number of query heads for a KV head, each head size, and each page size. Query head h
# reads KV head h // group. In float32 and float16: the interpreter cannot run bfloat16, because it
# multiplies the raw bits. Tests below compile the same source for bfloat16, and a GPU runs it.
SHAPES: list[dict[str, Any]] = [
    *({"contexts": [33, 6, 40, 9], "counts": [1, 1, 12, 9], "heads": (2 * group, 2)}
      for group in range(1, 9)),
    *({"contexts": [17, 5, 21, 3], "counts": [1, 1, 8, 3], "heads": (6, 2), "dim": dim,
       "page_size": 8, "dtype": dtype}
      for dim in (32, 64, 80, 96, 128, 256) for dtype in (torch.float32, torch.float16)),
    *({"contexts": [*edges, *edges], "counts": [1, 1, 1, *(min(edge, 5) for edge in edges)],
       "page_size": size}
      for size in (1, 2, 3, 16, 64, 256) for edges in [[max(1, size + d) for d in (-1, 0, 1)]]),
]  # fmt: skip
EDGE_CASES = [{"contexts": contexts, "counts": counts} for contexts, counts in EDGES]
# The chunk has more queries than one mask covers, so it is computed in blocks.
BLOCKS = {"contexts": [900, 700], "counts": [600, 530], "page_size": 16}


@pytest.mark.parametrize("shape", [*EDGE_CASES, BLOCKS], ids=str)
def test_the_torch_version_is_attention(attention: ModuleType, shape: dict[str, Any]) -> None:
    case = PagedCase(attention, **shape)
    torch.testing.assert_close(case.run(attention, torch.float64), dense(case))


@pytest.mark.parametrize("shape", [*EDGE_CASES, *SHAPES], ids=str)
def test_kernels_for_all_edges_heads_and_pages(
    attention: ModuleType, interpreted: ModuleType, shape: dict[str, Any]
) -> None:
    check(PagedCase(attention, **shape), interpreted)


def test_kernels_on_random_batches(attention: ModuleType, interpreted: ModuleType) -> None:
    chance = random.Random(0)
    for _ in range(12):
        decodes, chunks = chance.randint(0, 3), chance.randint(0, 3)
        counts = [1] * decodes + [chance.randint(2, 30) for _ in range(chunks)]
        if not counts:
            continue
        contexts = [n + chance.choice([0, 0, 1, 7, 64, 300]) for n in counts]
        group = chance.choice([1, 3, 4, 7])
        heads, dim = (group * chance.choice([1, 2]),), chance.choice([32, 80])
        kv_heads = heads[0] // group
        page_size = chance.choice([1, 4, 16])
        case = PagedCase(attention, contexts, counts, (heads[0], kv_heads), dim, page_size)
        check(case, interpreted)


def test_contexts_are_split_only_where_programs_are_missing(interpreted: ModuleType) -> None:
    """The standard benchmark has 256 requests and 8 KV heads: enough programs without splits."""
    size = interpreted.split_size
    assert [size(n * 8, 2048) for n in (1, 8, 16, 64, 256)] == [64, 128, 256, 1024, 2048]
    assert size(256 * 8, 40_960) == 4096, "a long context must not keep one program busy"
    assert size(1, 16) == 64, "a tile or two for each program"


@pytest.mark.before("kv_quant")  # its kernel does not split a context
def test_split_and_unsplit_contexts_agree(
    attention: ModuleType, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for programs in (1, 8, 1024):
        monkeypatch.setattr(interpreted, "PROGRAMS", programs)
        check(PagedCase(attention, [513, 1, 300, 256], [1] * 4), interpreted)


@pytest.mark.before("kv_quant")  # lines have a kernel of their own
def test_the_wider_of_keys_and_values_decides_the_tile(interpreted: ModuleType) -> None:
    keys = torch.zeros(2, 3, 4, 192, dtype=torch.float16)
    shape = interpreted.constants(torch.zeros(1, 4, 192), keys, torch.zeros(2, 3, 4, 128), 4)
    assert interpreted.tiles(keys, shape) == interpreted.kernels.tiles(2, 256, 2, 80)


LARGE = 2**31 // 64  # slots of 64 numbers


def test_a_pool_may_have_more_numbers_than_32_bits_can_count(
    attention: ModuleType, interpreted: ModuleType
) -> None:
    """The system gives memory to those pages only that are written: a few, at the end."""
    small, large = (
        PagedCase(attention, [19, 5, 9], [1, 1, 9], (2, 1), 64, 16, torch.float16) for _ in range(2)
    )
    shift = LARGE // 16  # pages: the address of each slot needs more than 32 bits
    large.keys, large.values = (
        torch.empty(1, shift + small.keys.shape[1], 16, 64, dtype=torch.float16) for _ in range(2)
    )
    large.keys[:, shift:], large.values[:, shift:] = small.keys, small.values
    large.meta.page_table += shift
    large.meta.slot_mapping += shift * 16
    outputs, n = [], small.meta.num_decodes
    for case in (small, large):
        interpreted.store_kv(case.keys, case.values, case.key, case.value, case.meta)
        memory = case.keys, case.values, case.meta, 0.25
        decoded = interpreted.paged_decode(case.query[:n], *memory)
        outputs.append([decoded, interpreted.paged_prefill(case.query[n:], *memory)])
    for ours, expected in zip(*outputs, strict=True):
        assert torch.equal(ours, expected) and not ours.isnan().any()


@pytest.mark.before("kv_quant")  # its kernel does not split a context
def test_a_context_that_is_not_split_needs_no_second_kernel(
    attention: ModuleType, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough requests fill the GPU. Then the first kernel writes the result itself."""
    monkeypatch.setattr(interpreted.kernels, "reduce_kernel", None)
    check(PagedCase(attention, [50, 1, 60], [1] * 3, dtype=torch.float16), interpreted)
    monkeypatch.setattr(interpreted, "PROGRAMS", 4)
    check(PagedCase(attention, [513, 1, 300, 256], [1] * 4), interpreted)


@pytest.mark.thorough("Triton's interpreter is slow")
@pytest.mark.only_of()
def test_the_engine_under_the_interpreter(milestone: str) -> None:
    """An engine on the interpreted kernels gives the reference's answer, token for token."""
    assert_engine_on_kernels(milestone, "tiny-qwen3")


@pytest.mark.thorough("Triton's interpreter is slow")
def test_heads_with_biases_under_the_interpreter(milestone: str) -> None:
    assert_engine_on_kernels(milestone, "tiny-qwen2")


def assert_engine_on_kernels(milestone: str, model: str) -> None:
    program = f"""
from tests.conftest import build_engine
from tests.helpers.oracle import assert_one_answer, greedy
engine = build_engine("{milestone}", "{model}", attention_backend="triton",
                      page_size=4, max_num_batched_tokens=11, max_num_seqs=3)
assert engine.core.runner.ops.__name__.endswith("triton_ops")
for output in engine.generate([[7], list(range(40, 57)), [1, 2], list(range(9))], greedy(8)):
    assert_one_answer("{model}", output, 8)
"""
    run_python("-c", program, TRITON_INTERPRET="1")


def test_kernels_are_refused_where_they_cannot_run(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="CUDA device"):
        make_engine(attention_backend="triton")


class NoCompiler:
    """Triton's driver on a machine without a C compiler. Triton creates it at the first use."""

    @property
    def active(self) -> Any:
        raise RuntimeError("Failed to find C compiler.")


class Gpu:
    """A model on a GPU of some compute capability, for `select_backend`. Its kernels may fail."""

    dtype, device = torch.float16, torch.device("cuda", 0)

    def __init__(
        self, capability: tuple[int, int], milestone: str, patch: pytest.MonkeyPatch
    ) -> None:
        self.select = load(milestone, "attention_backend").select_backend
        load(milestone, "triton_ops")  # for the interpreter, as the other tests need it
        self.failure: Exception | None = None
        patch.setattr(triton.knobs.runtime, "interpret", False)
        driver = SimpleNamespace(active=SimpleNamespace(utils=1))
        patch.setattr(triton.runtime, "driver", driver)
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        patch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA Test")
        patch.setattr(kernel_trial, "_run_once", self._run_once)

    def _run_once(self, *_: Any) -> None:
        if self.failure is not None:
            raise self.failure

    def backend(self, name: str) -> ModuleType:
        return self.select(name, self, [LayerKV(2, 64, 64)], 16)


def test_a_gpu_without_a_compiler_is_found_at_once(
    milestone: str,
    attention: ModuleType,
    interpreted: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Triton compiles its launcher in C. `auto` then warns and computes in torch."""
    gpu = Gpu((9, 0), milestone, monkeypatch)
    assert gpu.backend("auto") is gpu.backend("triton") is interpreted and not caplog.text
    monkeypatch.setattr(triton.runtime, "driver", NoCompiler())
    with pytest.raises(RuntimeError, match="needs a C compiler and Python's headers") as error:
        gpu.backend("triton")
    assert "Failed to find C compiler" in str(error.value), "the cause is missing"
    assert gpu.backend("auto") is attention
    assert caplog.text.count("Failed to find C compiler") == 1 and "torch" in caplog.text


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_kernels_that_fail_are_no_defect_of_the_model(
    milestone: str,
    attention: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
) -> None:
    """On a GPU that Triton supports, `auto` refuses: torch would be several times slower."""
    gpu = Gpu(capability, milestone, monkeypatch)
    gpu.failure = RuntimeError("PassManager::run failed")
    words = r"fail on NVIDIA Test: RuntimeError: PassManager.*attention_backend='torch'"
    with pytest.raises(RuntimeError, match=words):
        gpu.backend("triton")
    if capability >= (8, 0):
        with pytest.raises(RuntimeError, match=words):
            gpu.backend("auto")
    else:
        assert gpu.backend("auto") is attention
        assert caplog.text.count("PassManager::run failed") == 1
    others = (torch.OutOfMemoryError("no memory"), NotImplementedError("an exercise"), BdbQuit())
    for gpu.failure in others:  # they say nothing about the kernels
        with pytest.raises(type(gpu.failure)):
            gpu.backend("auto")


@pytest.mark.parametrize("name", ["store_kv", "paged_decode", "paged_prefill"])
def test_each_kernel_is_tried_before_the_model(
    make_engine: EngineFactory, interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The kernels are tried with the shapes of the layers of this model."""
    for page_size in (1, 8192):
        make_engine(attention_backend="triton", page_size=page_size)
    monkeypatch.setattr(interpreted, name, lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="kernels fail on the interpreter: ZeroDivisionError"):
        make_engine(attention_backend="triton")


@pytest.fixture(scope="session")
def compiled(milestone: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The report on every kernel compiled for every GPU."""
    return compile_report(f"{package(milestone)}.kernels", tmp_path_factory)


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_kernels_compile_for_real_gpus(compiled: list[dict[str, Any]]) -> None:
    """The kernels compile in three dtypes and three head sizes.

    They fit into the shared memory, and spill hardly any registers. So do unusual shapes of heads.
    """
    assert {entry["capability"] for entry in compiled} == SHARED_MEMORY.keys()
    assert {entry["dtype"] for entry in compiled} == {"fp16", "bf16", "fp32"}
    others = 2 * len(UNUSUAL) + 2 * 2 * len(ALONE)
    assert len(compiled) == 4 * 3 * (2 + 3 + 3) + 2 * 2 * 4 + others
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[entry["capability"]], entry
        assert entry["spill_stores"] <= FEW_BYTES, entry


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_kernels_read_pages_16_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    """Keys and values are copied into shared memory by the widest instructions there are."""
    for entry in compiled:
        is_wide = entry["capability"] >= 80  # a T4 has no asynchronous copies
        if is_wide and entry["kernel"] in ("decode_kernel", "prefill_kernel"):
            assert entry["wide_copies"] > 0, entry


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_attention_in_16_bits_uses_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    """From capability 8.0 on, both products of attention are computed by tensor cores.

    The other instructions of a program multiply less than one product for the three heads needs.
    """
    kinds = [entry for entry in compiled if entry["kernel"] in ("decode_kernel", "prefill_kernel")]
    for entry in kinds:
        used = entry["capability"] >= 80 and entry["dtype"] != "fp32"
        assert (entry["tensor_products"] > 0) == used, entry
        if used and "dim" in entry:
            assert entry["multiplications"] < GROUP * entry["dim"] * entry["tile"], entry


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_a_decode_loads_a_tile_while_it_computes_another(compiled: list[dict[str, Any]]) -> None:
    """With one buffer for keys and one for values, a program would wait for each of its tiles."""
    decodes = [
        entry for entry in compiled
        if entry["kernel"] == "decode_kernel" and entry["tensor_products"] and "dim" in entry
    ]  # fmt: skip
    assert len({entry["capability"] for entry in decodes}) == 6
    for entry in decodes:
        assert entry["buffers"] == ["2", "2"], entry


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_the_warps_of_a_prefill_divide_its_rows(compiled: list[dict[str, Any]]) -> None:
    """Otherwise both groups of warps of an H100 compute all scores, and a maximum needs all warps.

    On a B200, a product belongs to no warp. Wide heads need the memory of an H100.
    """
    prefills = [
        entry for entry in compiled
        if entry["kernel"] == "prefill_kernel" and entry["tensor_products"] and "dim" in entry
    ]  # fmt: skip
    for entry in prefills:
        if entry["dim"] <= 128 or entry["capability"] in (90, 100):
            expected = set() if entry["capability"] == 100 else {"8, 1"}
            assert set(entry["warps"]) == expected, entry


@pytest.mark.thorough("it compiles each kernel for seven kinds of GPU")
def test_a_decode_without_tensor_cores_multiplies_for_its_heads_only(
    compiled: list[dict[str, Any]],
) -> None:
    """A tile has hardly more rows than query heads, and hardly any score is computed twice.

    The limit is three times the multiplications that the heads need. 16 rows for the three heads
    would be more than five times.
    """
    decodes = [
        entry for entry in compiled
        if entry["kernel"] == "decode_kernel" and "dim" in entry and not entry["tensor_products"]
    ]  # fmt: skip
    assert {(entry["capability"], entry["dtype"]) for entry in decodes} == {
        (75, "fp16"), (75, "fp32"), (80, "fp32"), (90, "fp32"),
    }  # fmt: skip
    for entry in decodes:
        needed = 2 * GROUP * entry["dim"] * entry["tile"]  # of a tile: keys, and values
        assert entry["multiplications"] <= 3 * needed, entry


@pytest.mark.thorough("it compiles all kernels")
def test_no_step_waits_for_a_compiler(milestone: str) -> None:
    """Steps of all shapes use the same variant of a kernel, so the first ones compile it."""
    variants = json.loads(
        run_python("-m", "tests.helpers.count_variants", milestone, TRITON_INTERPRET=None)
    )
    assert 0 < variants.pop("widest") < 2**16, "a launch with 65,536 tokens fails on a GPU"
    assert variants.pop("rms_norm_kernel") == 2, "one for the hidden size, one for heads"
    assert variants.pop("decode_kernel") == 2, "contexts that are split, and those that are not"
    assert len(variants) == 7 and set(variants.values()) == {1}, variants
