"""kv_quant: packed lines, and attention to them against a reference in float64."""

from __future__ import annotations

import random
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
import torch

from common import EngineConfig, LLMEngine
from common.fast import cpu_attention
from common.fast.cpu_kernels import kernels
from common.hf.probe import LayerKV
from milestones.chain import load
from milestones.lab.instruments.audit import audited_engine_class, poison_of
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests import conftest
from tests.conftest import EngineFactory, ModuleOf, build_engine, plain_model, shared_model
from tests.helpers.oracle import (
    PackedCache,
    assert_one_answer,
    assert_same_tokens,
    drain,
    generate,
    greedy,
    in_4_bits,
    in_8_bits,
    in_fp8,
)

pytestmark = [pytest.mark.since("kv_quant"), pytest.mark.cpu]

BACKENDS = [
    "torch",
    pytest.param("compiled", marks=pytest.mark.skipif(kernels() is None, reason="no C compiler")),
    "triton",
]
BATCHES = [  # contexts and new tokens of the requests, at the edges of pages and parts
    ([1], [1]),
    ([1, 3, 4, 5, 8], [1, 1, 1, 1, 1]),
    ([1, 255, 256, 257, 513], [1, 1, 1, 1, 1]),
    ([7, 16, 70, 2, 65], [1, 1, 70, 2, 3]),
    ([300, 5], [300, 5]),
]
# The formats, and the numbers that lines stand for.
ROUNDED = {"int8": in_8_bits, "fp8": in_fp8, "int4": in_4_bits}
UNUSUAL = [
    [0.0] * 8,
    [1.0, -1.0, 0.5, -0.5, 0.25, 0.0, 0.1, -0.1],
    [1e30, 1.0, -1e30, 1e-30, 0.0, 5.0, -5.0, 1e29],
    [1e-44, -1e-45, 0.0, 3e-45, 0.0, 0.0, 0.0, 0.0],  # 1/127 of them is no float
    [2e-43, -1e-43, 0.0, 3e-45, 1.9e-43, 0.0, 0.0, 0.0],
    [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5],  # halves, between two steps
    [448.0, 2**-10, 3 * 2**-10, -(2**-10), 15 * 2**-10, 17.0, 19.0, -0.0],  # the same in fp8
    [-3.4e38, 3.4e38, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [-0.0] * 8,
    [-0.0, 0.0, 1.0, 2.0, 3.0, 0.5, -0.0, 0.0],  # the smallest number has two forms
]
SMALLEST_NORMAL = 2.0**-126  # some CPUs convert smaller numbers to a bfloat16 of zero


def ops_of(backend: str) -> ModuleType:
    if backend == "compiled":
        return cpu_attention
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is for Linux")
    return load("kv_quant", {"torch": "attention", "triton": "triton_ops"}[backend])


def packed_case(name: str, contexts: list[int], counts: list[int], **shape: Any) -> PagedCase:
    """Return a random batch over packed pages. All bits of a slot without a token are set.

    name: the format of the lines.
    """
    case = PagedCase(load("kv_quant", "attention"), contexts, counts, **shape)
    formats = load("kv_quant", "formats")
    for part in ("keys", "values"):
        memory = getattr(case, part)
        lines = formats.pack_as(memory, formats.find_format(name))
        lines[memory.isnan().any(dim=-1)] = int(poison_of(lines))
        setattr(case, part, lines)
    return case


def engine_of(name: str, **config: Any) -> LLMEngine:
    """Return an audited engine with a format of lines."""
    config = {"enable_overlap": conftest.MODE != "serial", **config}
    make: Any = audited_engine_class("kv_quant", conftest.MODE)
    config = {"model": "tiny-llama", "device": "cpu", **config}
    engine: LLMEngine = make(
        EngineConfig(**config), shared_model("tiny-llama"), kv_cache_dtype=name
    )
    return engine


def run(case: PagedCase, ops: ModuleType) -> torch.Tensor:
    """Store the new tokens, then run attention. Returns [T, heads, dim]."""
    keys, values, meta = case.keys.clone(), case.values.clone(), case.meta
    ops.store_kv(keys, values, case.key, case.value, meta)
    n, parts = meta.num_decodes, []
    if n:
        parts.append(ops.paged_decode(case.query[:n], keys, values, meta, SCALE))
    if n < len(meta.seq_lens_cpu):
        parts.append(ops.paged_prefill(case.query[n:], keys, values, meta, SCALE))
    return torch.cat(parts)


def expected(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention in float64 to packed numbers, and how far packing may move it, [T, H, D].

    A number of a line is off by at most `most_off`. A score moves by at most the sum of |q| times
    that; the weights of the softmax by a factor of at most exp(2 * that); a value by `most_off`.
    """
    formats, meta = load("kv_quant", "formats"), case.meta
    name = {dtype: name for name, dtype in formats.FORMATS.items()}[case.keys.dtype]
    keys, values = (formats.unpack_as(x).double().flatten(1, 2) for x in (case.keys, case.values))
    for memory, new in ((keys, case.key), (values, case.value)):
        memory[:, meta.slot_mapping] = ROUNDED[name](new).double().transpose(0, 1)
    group = case.query.shape[1] // keys.shape[0]
    outputs, bounds, at = [], [], 0
    for row, (context, count) in enumerate(
        zip(meta.seq_lens_cpu, meta.query_lens_cpu, strict=True)
    ):
        positions = torch.arange(context)
        slots = meta.page_table[row, positions // meta.page_size].long() * meta.page_size
        slots += positions % meta.page_size
        k, v = (m[:, slots].repeat_interleave(group, 0) for m in (keys, values))
        off_k, off_v = (most_off(name, x) for x in (k, v))  # [heads, context, dim]
        for i in range(count):
            seen = context - count + i + 1
            q = case.query[at].double()  # [heads, dim]
            weights = (torch.einsum("hd,hsd->hs", q, k[:, :seen]) * SCALE).softmax(-1)
            outputs.append(torch.einsum("hs,hsd->hd", weights, v[:, :seen]))
            moved = SCALE * torch.einsum("hd,hsd->hs", q.abs(), off_k[:, :seen])  # of the scores
            factor = (2 * moved.amax(-1)).exp() - 1
            largest = v[:, :seen].abs().amax(dim=(1, 2))
            bounds.append(factor * largest + off_v[:, :seen].amax(dim=(1, 2)))
            at += 1
    return torch.stack(outputs), torch.stack(bounds)


def most_off(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return by how much each number of a line may be off: half a step.

    The steps of e4m3 are an eighth of a number's power of two, and 2^-9 scales below 2^-6 scales.
    In 4 bits, the smallest number is rounded to bfloat16, so it may be cut off by 2^-9 of its size.
    """
    if name == "int4":
        low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
        return torch.maximum((high - low) / 30, low.abs() * 2**-9).expand_as(numbers)
    scale = numbers.abs().amax(-1, keepdim=True) / {"int8": 127, "fp8": 448}[name]
    if name == "int8":
        return (scale / 2).expand_as(numbers)
    return torch.maximum(numbers.abs() / 16, scale / 1024)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("contexts", "counts"), BATCHES, ids=str)
def test_attention_reads_packed_lines(
    name: str, backend: str, contexts: list[int], counts: list[int]
) -> None:
    """Against float64 over the numbers that lines stand for. Other slots are NaN."""
    if backend == "triton" and sum(counts) > 100:
        pytest.skip("Triton's interpreter is slow")
    case = packed_case(name, contexts, counts)
    wanted, _bound = expected(case)
    got = run(case, ops_of(backend)).double()
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_batches(name: str, backend: str) -> None:
    chance = random.Random(1)
    for _ in range(4 if backend == "triton" else 40):
        counts = [1] * chance.randint(0, 4)
        counts += [chance.randint(2, 40) for _ in range(chance.randint(0 if counts else 1, 3))]
        contexts = [n + chance.choice([0, 0, 1, 7, 64, 300]) for n in counts]
        kv_heads, group = chance.choice([1, 2, 3]), chance.randint(1, 5)
        dim, page_size = chance.choice([4, 8, 20, 64, 80]), chance.choice([1, 3, 16])
        case = packed_case(
            name, contexts, counts, heads=(group * kv_heads, kv_heads), dim=dim,
            page_size=page_size,
        )  # fmt: skip
        wanted, _bound = expected(case)
        got = run(case, ops_of(backend)).double()
        error = float((got - wanted).norm() / wanted.norm())
        assert error < 1e-5, (contexts, counts, kv_heads, group, dim, page_size)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_attention_has_a_bound(name: str, seed: int) -> None:
    """Attention to float numbers and to packed ones differ by at most the derived bound."""
    chance = random.Random(seed)
    counts = [1, 1, chance.randint(2, 30)]
    contexts = [n + chance.choice([0, 7, 90]) for n in counts]
    case = PagedCase(load("m5_overlap", "attention"), contexts, counts)
    in_float = case.run(case.attention, torch.float64)
    packed = packed_case(name, contexts, counts)
    wanted, bound = expected(packed)
    moved = (wanted - in_float).abs()
    assert bool((moved <= bound[..., None]).all()), "packing moves a result too far"
    assert float(moved.max()) > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("name", ROUNDED)
def test_the_error_of_a_number_has_a_bound(name: str) -> None:
    """Against float64, for numbers of all sizes. The oracle, written apart, rounds alike."""
    formats = load("kv_quant", "formats")
    x = torch.randn(500, 3, 16) * 2.0 ** torch.randint(-14, 4, (500, 3, 16))
    found = formats.unpack_as(formats.pack_as(x, formats.find_format(name)))
    assert torch.equal(found, ROUNDED[name](x))
    off = (found.double() - x.double()).abs()
    most = most_off(name, found.double())
    rounding = 3e-7 * x.double().abs().amax(-1, keepdim=True)  # of the scale and the product
    assert bool((off <= most + rounding).all())
    assert float((off / most).max()) > 0.99, "a step is not wider than it must be"


def test_each_byte_of_fp8_has_the_number_of_torch() -> None:
    """Finite bytes in lines of scale 1, in C and in Triton: a value of one token is its output."""
    for backend in ("torch", *(("compiled",) if kernels() else ()), "triton"):
        case = packed_case("fp8", [1], [1], heads=(1, 1), dim=256, page_size=1)
        case.value = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        case.value = case.value.nan_to_num(448.0)[None, None]
        assert torch.equal(run(case, ops_of(backend)), case.value), backend


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_write_the_same_bits(name: str, backend: str) -> None:
    """Zeros, halves, numbers so small that their scale is zero, and so large that it is not."""
    attention = load("kv_quant", "attention")
    sizes = 2.0 ** torch.randint(-14, 3, (16, 8))
    numbers = [torch.randn(24, 8) * 3, torch.randn(16, 8) * sizes, torch.tensor(UNUSUAL)]
    x = torch.cat(numbers)[:, None].repeat(1, 2, 1)
    x[:, 1] *= 0.37
    if name == "int4":
        x[x.abs() < SMALLEST_NORMAL] = 0
    tokens = len(x)
    meta = attention.AttentionMetadata(
        slot_mapping=torch.randperm(64)[:tokens],
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        page_table=torch.arange(16, dtype=torch.int32)[None], page_size=4, num_decodes=0,
        query_lens_cpu=[tokens], seq_lens_cpu=[tokens],
    )  # fmt: skip
    written = []
    for ops in (attention, ops_of(backend)):
        formats = load("kv_quant", "formats")
        line_type = formats.find_format(name)
        shape = 2, 16, 4, formats.line_length(8, line_type)
        keys, values = (torch.zeros(shape, dtype=line_type) for _ in "kv")
        ops.store_kv(keys, values, x, x.flip(0).contiguous(), meta)
        written.append((keys, values))
    for ours, theirs in zip(*written, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_not_finite(name: str, backend: str, bad: float) -> None:
    """I4: a request with NaN ends with an error. 8 bits must not turn it into a plausible text."""
    case, ops = packed_case(name, [9], [9]), ops_of(backend)
    case.key[3, 0, 5] = bad
    found = run(case, ops)
    assert not found[3:].isfinite().all(dim=-1)[:, :2].any(), "the heads that read this key"
    assert found[:3].isfinite().all() and found[:, 2:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
def test_chunks_change_no_token(make_engine: EngineFactory, backend: str, chunk: int) -> None:
    """I2: prompts with chunks of 1 to 64 tokens, and a prefix from the tree."""
    prompts = [list(range(5, 75)), [*range(5, 40), 9, 9], [7] * 33]
    whole, parts = (
        make_engine(attention_backend=backend, page_size=4, max_num_batched_tokens=budget)
        for budget in (2048, chunk)
    )
    params = greedy(12, ignore_eos=True)
    for _again in range(2):  # the second time, the tree has their pages
        ours, theirs = (engine.generate(prompts, params) for engine in (parts, whole))
        assert [o.outputs for o in ours] == [o.outputs for o in theirs]
    assert parts.stats().cached_prompt_tokens > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_an_engine_in_another_format(name: str, backend: str) -> None:
    """I1: the answers are those of Hugging Face's model over a cache that rounds alike."""
    prompts = [[5, 6, 7, 8, 9], [1, 2]] if backend == "triton" else [[*range(5, 45)], [7] * 33]
    length = 3 if backend == "triton" else 20
    engine = engine_of(name, attention_backend=backend, page_size=4, max_num_batched_tokens=7)
    model = plain_model("tiny-llama")
    for output in engine.generate(prompts, greedy(length)):
        cache = PackedCache.of(ROUNDED[name])
        expected = generate(model, tuple(output.prompt_token_ids), length, cache)
        assert_same_tokens(expected, output.outputs[0].token_ids)


@pytest.mark.parametrize("name", ["fp16", "", "INT8"])
def test_a_format_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of int8, fp8, int4, got"):
        engine_of(name)


def test_an_engine_on_the_kernels(make_engine: EngineFactory, milestone: str) -> None:
    """I1: Triton's interpreter is slow, so there are few tokens, in chunks of three."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    engine: Any = make_engine(attention_backend="triton", page_size=4, max_num_batched_tokens=3)
    assert engine.core.runner.ops is load(milestone, "triton_ops")
    for output in engine.generate([[5, 6, 7, 8, 9], [1, 2]], greedy(3, ignore_eos=True)):
        assert_one_answer("tiny-llama", output, 3)


@pytest.mark.skipif(kernels() is None, reason="no C compiler")
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunks_change_no_bit(name: str, chunk: int) -> None:
    """I2: with the kernels in C, log probabilities are equal in all digits."""
    prompt = [3 + 7 * i % 250 for i in range(70)]
    params = greedy(8, prompt_logprobs=2, logprobs=3, ignore_eos=True)
    tables = []
    for budget in (2048, chunk):
        engine = engine_of(name, page_size=4, max_num_batched_tokens=budget)
        engine.add_request([9] * 20, greedy(30, ignore_eos=True))  # a neighbour
        request_id = engine.add_request(prompt, params)
        output = drain(engine)[request_id][-1]
        tables.append((output.prompt_logprobs, output.outputs[0].logprobs))
    assert tables[0] == tables[1]


def test_the_same_memory_holds_more_pages(
    make_engine: EngineFactory, code_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number takes a byte, and a line four more: with heads of 16, 20 bytes and not 64."""
    memory = 100 * (16 * 2 * 2 * 2 * 16 * 4)  # 100 pages of m5, of 16 tokens in float32
    monkeypatch.setattr(code_of("kv_pool"), "free_memory", lambda device: memory)
    engine: Any = make_engine(max_model_len=512, max_num_seqs=64)
    assert engine.stats().kv_pages_total == 100 * 64 // 20
    pool = engine.core.runner.kv_pool
    assert sum(x.nbytes for x in (*pool.keys, *pool.values)) <= memory + memory // 100


@pytest.mark.parametrize(("dim", "dtype", "packs"), [
    (16, torch.float32, True), (64, torch.bfloat16, True), (18, torch.float32, False),
    (64, torch.float64, False),
])  # fmt: skip
def test_what_cannot_be_packed_stays_float(
    module_of: ModuleOf, dim: int, dtype: torch.dtype, packs: bool
) -> None:
    pool = module_of("kv_pool").KVPool(
        [LayerKV(2, dim, dim)], EngineConfig(num_pages=3), dtype, torch.device("cpu"), torch.int8
    )
    assert (pool.keys[0].dtype == torch.int8) == packs
    assert pool.keys[0].shape == (2, 4, 16, dim + 4 if packs else dim)


def test_no_pool_of_another_format_is_allocated(
    module_of: ModuleOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An int4 pool may fit where an int8 one does not. The model is checked with some floats."""
    pool, made = module_of("m5_kv_pool").KVPool, []
    init = pool.__init__

    def counted(self: Any, layers: Any, config: Any, dtype: torch.dtype, device: Any) -> None:
        made.append(dtype)
        init(self, layers, config, dtype, device)

    monkeypatch.setattr(pool, "__init__", counted)
    engine_of("int4")
    assert made == [torch.float32, torch.int16]


def test_the_answers_differ_from_float() -> None:
    """The tests can fail: on this model, each format changes a token, and not the same ones."""
    prompts = [[7 * i % 256 for i in range(n, n + 30)] for n in range(12)]
    found = [
        [o.outputs[0].token_ids for o in engine.generate(prompts, greedy(40))]
        for engine in (build_engine("m5_overlap"), *map(engine_of, ROUNDED))
    ]
    assert all(ours != theirs for ours, theirs in combinations(found, 2))
