"""The questions of kv_quant: random lines, and attention to random pages of lines."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch

from milestones.electives.kv_quant import attention, m5_attention
from milestones.electives.kv_quant.formats import pack_fp8
from milestones.electives.kv_quant.packing import SCALE_BYTES, pack, unpack
from milestones.lab.instruments.paged_case import PagedCase
from tests.exercises.test_kv_quant_2 import packed_case, run

Asked = Iterator[tuple[str, str, Any]]


def lines(chance: Random) -> Asked:
    """Pack random numbers of many sizes, whole and in parts, and unpack them."""
    for dtype in (torch.float32, torch.bfloat16):
        drawn = torch.Generator().manual_seed(chance.randrange(2**30))
        shape = (chance.randint(2, 9), chance.randint(1, 3), 4 * chance.randint(1, 4))
        x = (torch.randn(shape, generator=drawn) * 10 ** chance.uniform(-3, 3)).to(dtype)
        x[0, 0] = 0
        about = f"{dtype}, {shape}"
        yield "lines", about, pack(x).tolist()
        yield "lines of fp8", about, pack_fp8(x).tolist()
        yield "lines of one token", about, pack(x[1:2]).tolist()
        yield "numbers", about, unpack(pack(x)).tolist()
        yield "numbers in bfloat16", about, unpack(pack(x), torch.bfloat16).float().tolist()
    x = torch.ones(2, 4)
    x[1, 2] = chance.choice([torch.nan, torch.inf])
    yield "lines that are not finite", "", unpack(pack(x)).isfinite().all(dim=-1).tolist()


def attended(chance: Random) -> Asked:
    """Store new tokens in random pages, and attend to them."""
    decodes = chance.sample([3, 7, 12, 30], 3)
    counts = [1] * len(decodes) + [chance.randint(2, 9) for _ in range(2)]
    contexts = decodes + [count + chance.choice([0, 3, 20]) for count in counts[len(decodes) :]]
    page_size, at_once = chance.choice([1, 4]), m5_attention.GATHER_SLOTS
    m5_attention.GATHER_SLOTS = 20  # decodes are gathered in groups, in another order
    try:
        case = packed_case(contexts, counts, page_size=page_size, dim=8)
        in_float = PagedCase(attention, contexts, counts, page_size=page_size, dim=8)
        _ = case.meta.decode_groups, in_float.meta.decode_groups  # made when they are first read
    finally:
        m5_attention.GATHER_SLOTS = at_once
    case.value, case.values = case.value[..., :4], case.values[..., : SCALE_BYTES + 4].contiguous()
    about = f"contexts {contexts}, new {counts}"
    keys, values = case.keys.clone(), case.values.clone()
    attention.store_kv(keys, values, case.key, case.value, case.meta)
    slots = case.meta.slot_mapping
    for name, memory in (("keys", keys), ("values", values)):
        yield f"{name} in their slots", about, memory.flatten(1, 2)[:, slots].tolist()
    found = run(case).mul(1000).round().tolist()
    n = case.meta.num_decodes
    yield "decodes", about, found[:n]
    yield "chunks", about, found[n:]
    yield "pages in float", about, in_float.run(attention).mul(1000).round().tolist()


QUESTIONS = {"kv_quant.1": (lines, 20), "kv_quant.2": (attended, 20)}
