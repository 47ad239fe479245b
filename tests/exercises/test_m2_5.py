"""m2.5: the cache the model sees. `KVPool.update` and `move`, on memory full of old numbers."""

from __future__ import annotations

import pytest
import torch

from common import EngineConfig
from common.hf.support import LayerKV
from m2_continuous.kv_cache import Move
from m2_continuous.kv_pool import KVPool

PREFILL = ([2, 0], [[0, 1, 2]] * 2, 3)  # rows, positions, longest context
DECODE = ([0, 1, 2], [[4], [1], [7]], 8)  # contexts of 5, 2 and 8 tokens
ROWS, TOKENS, HEADS, KEY_DIM, VALUE_DIM = 4, 10, 3, 4, 2
JUNK = 1e6


@pytest.fixture
def pool() -> KVPool:
    """A pool in which each number is different, as if other requests had used it."""
    pool = make_pool()
    for memory in (*pool.keys, *pool.values):
        memory.copy_(JUNK + torch.arange(memory.numel()).view_as(memory))
    return pool


def make_pool() -> KVPool:
    """Return a pool of two layers, with four rows of ten tokens."""
    layer = LayerKV(HEADS, KEY_DIM, VALUE_DIM)
    config = EngineConfig(max_num_seqs=ROWS, max_model_len=TOKENS)
    return KVPool([layer, layer], config, torch.float32, torch.device("cpu"))


def step(
    pool: KVPool, rows: list[int], positions: list[list[int]], context: int, layer: int = 0,
    numbers: torch.Generator | None = None,
) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Call `update` of a layer with random keys and values.

    Return for keys and for values: the name, what was given, what was returned, the memory.
    """
    pool.begin_step(torch.tensor(rows), torch.tensor(positions), context)
    shape = (len(rows), HEADS, len(positions[0]))
    new = [torch.randn(*shape, dim, generator=numbers) for dim in (KEY_DIM, VALUE_DIM)]
    returned = pool.update(new[0].clone(), new[1].clone(), layer)
    memory = pool.keys[layer], pool.values[layer]
    return list(zip(("keys", "values"), new, returned, memory, strict=True))


def test_a_prefill_attends_to_itself(pool: KVPool) -> None:
    """The joining requests have no tokens in the cache; old tokens lie in their rows."""
    for name, new, returned, memory in step(pool, *PREFILL):
        assert returned.shape == new.shape and torch.equal(new, returned), (
            f"I2: a prefill of 2 x 3 tokens gets exactly its own {name} back"
        )
        for i, row in enumerate((2, 0)):
            assert torch.equal(memory[row, :, :3], new[i]), (
                f"I1: {name} of request {i}, which owns row {row}, go to slots 0 to 2 of that row"
            )


def test_a_prompt_of_one_token_attends_to_itself(pool: KVPool) -> None:
    """It is as wide as a decode. Its row is not the first one, where a decode would look."""
    for name, new, returned, memory in step(pool, [3], [[0]], 1):
        assert torch.equal(memory[3, :, 0], new[0, :, 0]), f"I1: {name} go to slot 0 of row 3"
        assert torch.equal(new, returned), (
            f"I2: a prefill of one token in row 3 gets its own {name} back: the context is 1 token"
        )


def test_a_decode_is_stored_at_its_own_position(pool: KVPool) -> None:
    """The contexts are different: 5, 2 and 8 tokens."""
    for name, new, _, memory in step(pool, *DECODE):
        for row, position in enumerate((4, 1, 7)):
            assert torch.equal(memory[row, :, position], new[row, :, 0]), (
                f"I1: {name} of the new token of row {row} go to slot {position}, its position"
            )


def test_a_decode_attends_to_all_rows_up_to_the_longest_context(pool: KVPool) -> None:
    for name, _, returned, memory in step(pool, *DECODE):
        assert torch.equal(returned, memory[:3, :, :8]), (
            f"I1: `update` returns the {name} in slots 0 to 7 of rows 0 to 2, new tokens included: "
            f"[3, {HEADS}, 8, dim], got {list(returned.shape)}"
        )


def test_a_decode_copies_nothing(pool: KVPool) -> None:
    """A copy of the cache in every layer of every step would cost more than the attention."""
    for name, _, returned, memory in step(pool, *DECODE):
        assert returned.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr(), (
            f"a decode attends to a view of the pool, but these {name} are a copy"
        )


@pytest.mark.parametrize(
    ("rows", "positions", "context"),
    [PREFILL, DECODE, ([3], [[0]], 1)],
    ids=["prefill", "decode", "prompt of one token"],
)
def test_no_other_slot_is_touched(
    pool: KVPool, rows: list[int], positions: list[list[int]], context: int
) -> None:
    before = [memory.clone() for memory in (*pool.keys, *pool.values)]
    step(pool, rows, positions, context, layer=1)
    for i, (old, memory) in enumerate(zip(before, (*pool.keys, *pool.values), strict=True)):
        changed = {(r, p) for r, _, p, _ in torch.nonzero(old != memory).tolist()}
        allowed = {(r, p) for r, ps in zip(rows, positions, strict=True) for p in ps}
        assert changed == (allowed if i in (1, 3) else set()), (
            f"I2: layer 1 stores (row, slot) {sorted(allowed)}; changed in layer {i % 2} are "
            f"{sorted(changed)}"
        )


@pytest.mark.parametrize("num_tokens", [1, 6, TOKENS])
def test_a_move_copies_all_tokens_in_every_layer(pool: KVPool, num_tokens: int) -> None:
    before = [memory.clone() for memory in (*pool.keys, *pool.values)]
    pool.move(Move(source=3, target=1, num_tokens=num_tokens))
    for i, (old, memory) in enumerate(zip(before, (*pool.keys, *pool.values), strict=True)):
        assert torch.equal(memory[1, :, :num_tokens], old[3, :, :num_tokens]), (
            f"I2: {'keys' if i < 2 else 'values'} of layer {i % 2}: row 1 must contain the "
            f"{num_tokens} tokens of row 3"
        )
        assert torch.equal(memory[1, :, num_tokens:], old[1, :, num_tokens:]), (
            f"a move copies the first {num_tokens} tokens, not the whole row of {TOKENS} slots"
        )
        assert torch.equal(memory[[0, 2, 3]], old[[0, 2, 3]]), "I2: other rows were changed"
