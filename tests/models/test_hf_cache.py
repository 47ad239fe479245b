"""Decode steps over a Hugging Face cache: it grows in place, and attention in C reads it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from common import EngineConfig, load_model
from common.fast.cpu_kernels import Kernels, kernels
from common.fast.passes.hf_cache import ROOM, CacheAttention, append
from tests.conftest import plain_model

pytestmark = pytest.mark.cpu


def model(name: str = "tiny-llama") -> PreTrainedModel:
    return load_model(EngineConfig(model=name, device="cpu")).model


def tokens(count: int, batch: int = 1, heads: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, heads, count, 8, generator=torch.Generator().manual_seed(seed))


def layer_of(cache: DynamicCache) -> Any:
    return cache.layers[0]


def cache_of(*counts: int) -> DynamicCache:
    """A cache with one layer that has been updated with these numbers of tokens."""
    cache = DynamicCache()
    for i, count in enumerate(counts):
        append(cache, tokens(count, seed=i), tokens(count, seed=-i), 0)
    return cache


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-gemma3_text"])
@torch.inference_mode()
def test_a_model_computes_what_it_did(name: str) -> None:
    """With caches of Hugging Face's own, alone and with padding on the left, whole and in parts."""
    changed, plain = model(name), plain_model(name).model
    ids = torch.arange(3, 63).view(2, 30)
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[0, :4] = 0
    for rows, given in ((slice(0, 1), None), (slice(0, 2), None), (slice(0, 2), mask)):
        caches = DynamicCache(config=plain.config), DynamicCache(config=plain.config)
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 20), (20, 21), (21, 22)):
            theirs, ours = (
                one(
                    ids[rows, start:end],
                    past_key_values=cache,
                    attention_mask=None if given is None else given[:, :end],
                ).logits
                for one, cache in zip((plain, changed), caches, strict=True)
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert [type(x) for x in caches[1].layers] == [type(x) for x in caches[0].layers]
        assert caches[1].get_seq_length() == 22


def test_a_step_copies_only_its_tokens() -> None:
    cache = cache_of(3, 1)
    layer = layer_of(cache)
    place = layer.keys.data_ptr()
    for _ in range(ROOM):
        append(cache, tokens(1), tokens(1), 0)
    assert layer.keys.data_ptr() == place and cache.get_seq_length() == ROOM + 4
    append(cache, tokens(1), tokens(1), 0)
    assert layer.keys.data_ptr() != place, "no room is left"
    assert torch.equal(layer.keys[:, :, 4:], tokens(1).expand(-1, -1, ROOM + 1, -1))


def test_the_cache_has_what_hugging_face_would_have() -> None:
    theirs, counts = DynamicCache(), (5, 1, 3, 1)
    for i, count in enumerate(counts):
        theirs.update(tokens(count, seed=i), tokens(count, seed=-i), 0)
    ours = cache_of(*counts)
    assert torch.equal(layer_of(ours).keys, layer_of(theirs).keys)
    assert torch.equal(layer_of(ours).values, layer_of(theirs).values)


@pytest.mark.parametrize("how", ["crop", "copy", "deepcopy", "reset", "reorder_cache"])
def test_tokens_of_another_owner_are_not_overwritten(how: str) -> None:
    """A cache that was cut or copied does not write to memory that another cache may read."""
    cache = cache_of(4, 1, 1)
    layer: Any = layer_of(cache)
    before = layer.keys
    kept, other = before.clone(), layer
    if how == "crop":
        layer.crop(-2)
    elif how == "reset":
        layer.reset()
    elif how == "reorder_cache":
        layer.reorder_cache(torch.tensor([0]))
    else:
        other = getattr(copy, how)(layer)
        append(cache, tokens(1, seed=7), tokens(1, seed=7), 0)
    cache.layers[0] = other
    expected = tokens(1, seed=9)
    if other.is_initialized:
        expected = torch.cat([other.keys, expected], dim=2)
    append(cache, tokens(1, seed=9), tokens(1, seed=9), 0)
    assert torch.equal(before, kept)
    assert torch.equal(other.keys, expected)
    if other is not layer:
        assert torch.equal(layer.keys, torch.cat([kept, tokens(1, seed=7)], dim=2))


def test_a_cache_of_inference_mode_can_be_used_outside_it() -> None:
    with torch.inference_mode():
        cache = cache_of(4, 1)
    append(cache, tokens(1, seed=5), tokens(1, seed=5), 0)
    assert torch.equal(layer_of(cache).keys[:, :, 5:], tokens(1, seed=5))


def test_what_does_not_fit_is_refused_as_before() -> None:
    cache = cache_of(4, 1)
    with pytest.raises(RuntimeError, match="Sizes of tensors"):
        append(cache, tokens(1, batch=2), tokens(1, batch=2), 0)
    assert cache.get_seq_length() == 5


def test_a_cache_of_another_kind_stores_tokens_itself() -> None:
    class Layer(DynamicLayer):
        pass

    cache = cache_of(4)
    cache.layers[0] = Layer()
    key = tokens(1)
    append(cache, key, tokens(1), 0)
    first = layer_of(cache).keys
    key.zero_()
    append(cache, tokens(1, seed=2), tokens(1), 0)
    assert torch.equal(layer_of(cache).keys, torch.cat([tokens(1), tokens(1, seed=2)], dim=2))
    assert first.data_ptr() != key.data_ptr(), "the caller overwrites its tensor"


def hidden(seen: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """A mask [B, 1, 1, S] in which each request sees these keys of ten."""
    visible = torch.zeros(len(seen), 1, 1, 10, dtype=torch.bool)
    for row, keys in enumerate(seen):
        visible[row, 0, 0, keys] = True
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(dtype).min)


FIRST = [[*range(10)], [*range(3)], [0]]  # the first keys
HOLES = [[*range(10)], [*range(4, 10)], [0, 2]]  # padding on the left, and a hole


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("seen", [FIRST, HOLES])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, seen: list[list[int]], dtype: torch.dtype, heads: int
) -> None:
    """C computes masks that hide the end of a row, as m2's do. Torch computes all others."""
    called = calls_of_c(monkeypatch)
    query = tokens(1, batch=3, heads=heads)
    mask = hidden(seen, dtype)
    for room in (0, 5):  # keys of their own, and a part of a larger memory
        key, value = (tokens(10 + room, batch=3, seed=s)[:, :, :10] for s in (1, 2))
        ours, theirs = both(query, key, value, mask)
        torch.testing.assert_close(ours, theirs)
    assert len(called) == (2 if seen is FIRST else 0)


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(-0.5 * torch.arange(10.0).flip(0).expand(2, 1, 1, 10), id="ALiBi"),
        pytest.param(torch.tensor([0.0] * 5 + [-2.0] * 5).expand(2, 1, 1, 10), id="a small bias"),
        pytest.param(hidden([[*range(6)]], torch.float32), id="one row for all requests"),
        pytest.param(hidden([[*range(6)]] * 2, torch.bool).expand(2, 6, 1, 10), id="by heads"),
    ],
)
def test_other_masks_are_torchs(monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor) -> None:
    called = calls_of_c(monkeypatch)
    key, value = tokens(10, batch=2, seed=1), tokens(10, batch=2, seed=2)
    ours, theirs = both(tokens(1, batch=2, heads=6), key, value, mask)
    assert torch.equal(ours, theirs) and not called


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler")
def test_keys_that_lie_in_another_order_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    called = calls_of_c(monkeypatch)
    key = tokens(10, batch=2).transpose(1, 2).contiguous().transpose(1, 2)  # heads inside tokens
    for keys in (key, tokens(10).expand(2, -1, -1, -1)):
        ours, theirs = both(tokens(1, batch=2), keys, keys, None)
        assert torch.equal(ours, theirs) and not called


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler")
@pytest.mark.parametrize("changed", ["dtype", "batch"])
def test_keys_that_do_not_fit_the_queries_are_refused_by_torch(
    monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """C would read what is not there."""
    called = calls_of_c(monkeypatch)
    key = tokens(10, batch=2).double() if changed == "dtype" else tokens(10, batch=3)
    with pytest.raises(RuntimeError):
        both(tokens(1, batch=2), key, key, None)
    assert not called


@pytest.mark.skipif(kernels() is None, reason="needs a C compiler")
def test_a_mask_that_changes_in_place_is_read_in_each_forward() -> None:
    loaded, ids = model(), torch.tensor([[5], [6]])
    plain = plain_model("tiny-llama").model
    mask = torch.zeros(2, 1, 1, 4)
    for end in (4, 3):
        mask[1, ..., end:] = torch.finfo(torch.float32).min
        given = {"attention_mask": mask, "position_ids": torch.full((2, 1), 3)}
        ours, theirs = (
            one(ids, past_key_values=filled(one, 3), **given).logits for one in (loaded, plain)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def filled(one: PreTrainedModel, count: int) -> DynamicCache:
    cache = DynamicCache(config=one.config)
    one(torch.arange(2 * count).view(2, count), past_key_values=cache)
    return cache


def calls_of_c(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called: list[int] = []
    own = Kernels.paged_attention

    def noted(*args: Any) -> torch.Tensor:
        called.append(1)
        return own(*args)

    monkeypatch.setattr(Kernels, "paged_attention", noted)
    return called


def both(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache, and torch's."""
    module: Any = torch.nn.Module()
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    ours, _ = CacheAttention()(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    return ours, theirs
