"""kv_quant.2: keys and values are packed when they are written, and read from the pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milestones.electives.kv_quant import attention, m5_attention
from milestones.electives.kv_quant.packing import SCALE_BYTES, pack, unpack
from milestones.lab.instruments.audit import poison_of
from milestones.lab.instruments.paged_case import SCALE, PagedCase
from tests.conftest import build_engine
from tests.helpers.oracle import drain, greedy, in_8_bits

BATCHES = [
    ([1], [1]),
    ([9, 3, 30], [1, 1, 1]),
    ([12, 5], [12, 5]),
    ([40, 7, 33, 20], [1, 1, 9, 20]),
]


def packed_case(contexts: list[int], counts: list[int], **shape: Any) -> PagedCase:
    """Return a random batch over packed pages. All bits of a slot without a token are set."""
    case = PagedCase(attention, contexts, counts, **shape)
    for name in ("keys", "values"):
        memory = getattr(case, name)
        lines = pack(memory)
        lines[memory.isnan().any(dim=-1)] = int(poison_of(lines))
        setattr(case, name, lines)
    return case


def run(case: PagedCase) -> torch.Tensor:
    """Store the new tokens, then attend. Returns [T, heads, dim]."""
    keys, values, meta = case.keys.clone(), case.values.clone(), case.meta
    attention.store_kv(keys, values, case.key, case.value, meta)
    n, parts = meta.num_decodes, []
    if n:
        parts.append(attention.paged_decode(case.query[:n], keys, values, meta, SCALE))
    if n < len(meta.seq_lens_cpu):
        parts.append(attention.paged_prefill(case.query[n:], keys, values, meta, SCALE))
    return torch.cat(parts)


def expected(case: PagedCase) -> torch.Tensor:
    """Return m5's attention to the numbers that the lines stand for, also those of new tokens."""
    float_case = PagedCase(
        m5_attention, case.meta.seq_lens_cpu, case.meta.query_lens_cpu,
        (case.query.shape[1], case.keys.shape[0]), case.query.shape[-1], case.meta.page_size,
    )  # fmt: skip
    float_case.keys, float_case.values = unpack(case.keys), unpack(case.values)
    float_case.query = case.query
    float_case.key, float_case.value = in_8_bits(case.key), in_8_bits(case.value)
    return float_case.run(m5_attention)


def test_lines_are_written_to_their_slots() -> None:
    case = packed_case([9, 12], [1, 4])
    keys, values, meta = case.keys.clone(), case.values.clone(), case.meta
    attention.store_kv(keys, values, case.key, case.value, meta)
    for memory, before, new in ((keys, case.keys, case.key), (values, case.values, case.value)):
        slots = memory.flatten(1, 2)
        assert torch.equal(slots[:, meta.slot_mapping], pack(new).transpose(0, 1))
        others = [s for s in range(slots.shape[1]) if s not in meta.slot_mapping.tolist()]
        assert torch.equal(slots[:, others], before.flatten(1, 2)[:, others])


@pytest.mark.parametrize(("contexts", "counts"), BATCHES, ids=str)
def test_every_query_reads_lines(contexts: list[int], counts: list[int]) -> None:
    """I2: also those of its own chunk, and of its own token."""
    case = packed_case(contexts, counts)
    torch.testing.assert_close(run(case), expected(case), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)], ids=str)
def test_heads_that_share_a_key(heads: tuple[int, int]) -> None:
    case = packed_case([9, 3, 14], [1, 1, 6], heads=heads, dim=16)
    torch.testing.assert_close(run(case), expected(case), atol=1e-5, rtol=1e-4)


def test_contexts_that_are_gathered_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group holds decodes of similar length, in another order than the batch."""
    monkeypatch.setattr(m5_attention, "GATHER_SLOTS", 20)
    case = packed_case([30, 7, 12, 3], [1, 1, 1, 1])
    assert len(case.meta.decode_groups) > 1
    torch.testing.assert_close(run(case), expected(case), atol=1e-5, rtol=1e-4)


def test_keys_and_values_of_different_sizes() -> None:
    case = packed_case([9, 3, 14], [1, 1, 6], dim=16)
    case.value = case.value[..., :8]
    case.values = torch.full((*case.values.shape[:-1], SCALE_BYTES + 8), -1, dtype=torch.int8)
    case.values[..., :SCALE_BYTES], case.values[..., SCALE_BYTES:] = pack(torch.ones(1))[:4], 5
    assert run(case).shape == (8, 4, 8)


def test_the_result_has_the_type_of_the_query() -> None:
    case = packed_case([9, 3, 14], [1, 1, 6])
    for name in ("query", "key", "value"):
        setattr(case, name, getattr(case, name).to(torch.bfloat16))
    found = run(case)
    assert found.dtype == torch.bfloat16 and found.isfinite().all()


def test_pages_in_float_are_m5s() -> None:
    """A model that cannot be packed, and the check of a model when it is loaded."""
    case = PagedCase(attention, [40, 7, 33, 20], [1, 1, 9, 20])
    assert torch.equal(case.run(attention), case.run(m5_attention))


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_a_chunk_border_changes_no_answer(chunk: int) -> None:
    """I2: the position of a token alone decides what others read of it."""
    prompts = [list(range(5, 45)), [9] * 20]
    answers = []
    for budget in (2048, chunk):
        engine = build_engine(
            "kv_quant", attention_backend="torch", page_size=4, max_num_batched_tokens=budget
        )
        for number, prompt in enumerate(prompts):
            params = greedy(10, ignore_eos=True, prompt_logprobs=0)
            engine.add_request(prompt, params, f"{number}")
        answers.append({name: found[-1] for name, found in drain(engine).items()})
        engine.close()
    for name, whole in answers[0].items():
        parts = answers[1][name]
        assert parts.outputs == whole.outputs, f"I2: chunks of {chunk} tokens"
        assert parts.prompt_logprobs is not None and whole.prompt_logprobs is not None
        for ours, theirs in zip(parts.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4), f"I2: chunks of {chunk} tokens"
