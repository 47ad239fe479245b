"""The sampler: its distributions, and its filters, compared with those of Hugging Face."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common import SamplingParams
from common.sampling.draws import BLOCK, DrawParams, draw, scale_and_filter, uniform
from common.sampling.sampler import SamplingMetadata, sample
from tests.exercises.by_hand import request_with


def metadata(*params: SamplingParams) -> SamplingMetadata:
    return SamplingMetadata.from_requests(list(map(request_with, params)), "cpu")


def draws(*params: SamplingParams) -> DrawParams:
    requests = list(map(request_with, params))
    return DrawParams.from_requests(requests, [0] * len(requests), "cpu")


def splitmix64(x: int) -> int:
    """Return the SplitMix64 hash (Steele, Lea, Flood), in unsigned integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20))
def test_the_hash_is_splitmix64(seed: int, position: int) -> None:
    mask = 2**64 - 1
    bits = splitmix64((splitmix64(seed & mask) + position) & mask)
    expected = ((bits >> 16) & (2**48 - 1)) / 2**48
    assert uniform(np.array([seed]), np.array([position])).tolist() == [expected]


def test_uniform_is_uniform_over_seeds_and_positions() -> None:
    for seeds, positions in [
        (np.arange(20000), np.full(20000, 3)),
        (np.full(20000, 3), np.arange(20000)),
    ]:
        u = uniform(seeds, positions)
        assert u.min() >= 0 and u.max() < 1
        counts = np.histogram(u, bins=20, range=(0, 1))[0]
        chi_square = float(((counts - 1000) ** 2 / 1000).sum())
        assert chi_square < 50, "19 degrees of freedom: the chance is 1 in 10,000"


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, -30.0])
    n = 20000
    params = [SamplingParams(temperature=0.7, seed=seed) for seed in range(n)]
    drawn = sample(logits.expand(n, -1), metadata(*params)).token_ids
    expected = (logits / 0.7).softmax(-1) * n
    counts = torch.bincount(drawn, minlength=6)
    chi_square = float(((counts - expected) ** 2 / expected.clamp(min=1e-9))[:5].sum())
    assert chi_square < 23.5, "4 degrees of freedom: the chance is 1 in 10,000"
    assert counts[5] == 0


LARGEST = 1 - 2.0**-48  # the largest number that `uniform` returns


def draw_at(number: float, logits: torch.Tensor) -> torch.Tensor:
    """Return the token of each row if the hash gives this number."""
    return draw(logits, torch.full((len(logits),), number, dtype=torch.float64))


@given(
    num_tokens=st.one_of(st.integers(1, 40), st.integers(BLOCK - 2, 3 * BLOCK)),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    spread=st.sampled_from([0.0, 10.0]),
    number=st.one_of(st.sampled_from([0.0, 0.5, LARGEST]), st.floats(0, LARGEST)),
    seed=st.integers(0, 1000),
)
def test_a_draw_inverts_the_sum_of_the_whole_row(
    num_tokens: int, share: float, spread: float, number: float, seed: int
) -> None:
    """Blocks do not change a token, and neither do other rows (I2). `share` of the tokens and one
    more are allowed, all of them equally likely if `spread` is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = -spread * torch.rand(3, num_tokens, generator=generator)
    logits[torch.rand(3, num_tokens, generator=generator) >= share] = -torch.inf
    logits[:, seed % num_tokens] = 0
    drawn = draw_at(number, logits)
    whole = logits.exp().double().cumsum(dim=-1)
    expected = torch.searchsorted(whole, number * whole[:, -1:], right=True).squeeze(-1)
    assert drawn.tolist() == expected.tolist()
    for row, token in zip(logits, drawn, strict=True):
        assert draw_at(number, row[None]) == token, "I2: alone it is another token"


def test_a_draw_at_the_border_of_a_block_skips_impossible_tokens() -> None:
    logits = torch.zeros(1, 2 * BLOCK + 5)
    logits[:, BLOCK : BLOCK + 5] = -torch.inf
    assert draw_at(0.5, logits) == BLOCK + 5
    assert draw_at(0.5 - 2.0**-48, logits) == BLOCK - 1


@pytest.mark.parametrize("num_tokens", [BLOCK, 2 * BLOCK, 2 * BLOCK + 5])
def test_a_draw_is_a_possible_token_where_sums_are_rounded(num_tokens: int) -> None:
    """Added to 1 one after the other, tiny weights change nothing. Added to each other, they do."""
    logits = torch.full((1, num_tokens), -torch.inf)
    logits[:, :BLOCK] = -37.4
    logits[:, 0] = 0
    assert logits[0, draw_at(LARGEST, logits)] > -torch.inf


@given(
    temperature=st.floats(0.05, 3.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_filters_agree_with_hugging_face(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """The filters keep the same tokens. Only a token at the very edge may differ."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = scale_and_filter(logits, draws(params)).softmax(-1)
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    theirs = LogitsProcessorList(warpers)(torch.LongTensor([[0]]), logits.clone()).softmax(-1)
    different = (ours > 0) != (theirs > 0)
    if different.any():
        probs = (logits / temperature).softmax(-1)
        assert int(different.sum()) == 1, "only a token on the edge may differ"
        sums = probs.sort(descending=True).values.cumsum(-1)
        edges = torch.cat([sums - top_p, probs / probs.max() - min_p], dim=-1).abs()
        assert float(edges.min()) < 1e-5
    else:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_filters_keep_to_their_rows() -> None:
    """The filters give each row of a mixed batch the same bits as the row alone."""
    logits = torch.randn(6, 200) * 4
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.5, top_k=3, seed=2),
        SamplingParams(temperature=0),
        SamplingParams(temperature=2.0, top_p=0.5, seed=3),
        SamplingParams(temperature=1.0, min_p=0.2, seed=4),
        SamplingParams(temperature=1.5, top_k=7, top_p=0.8, min_p=0.01, seed=5),
    ]
    together = scale_and_filter(logits, draws(*params))
    for row, p in enumerate(params):
        alone = scale_and_filter(logits[row : row + 1], draws(p))
        if not p.is_greedy:
            assert torch.equal(together[row : row + 1], alone), f"I2: row {row}"


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_keeps_exactly_k_of_equals(k: int) -> None:
    """Logits of half precision often tie. Of equal logits, those with the lower ids are kept."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 0.0]])
    kept = scale_and_filter(logits, draws(SamplingParams(top_k=k))) > -math.inf
    assert kept[0].nonzero().flatten().tolist() == list(range(1, 1 + k))


def test_top_k_of_one_is_greedy_even_with_ties() -> None:
    logits = torch.randn(64, 40).to(torch.bfloat16)
    params = [SamplingParams(temperature=1.7, top_k=1, seed=i) for i in range(64)]
    assert torch.equal(sample(logits, metadata(*params)).token_ids, logits.float().argmax(-1))


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    logits = torch.randn(8, 300) * 1e4
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(8)]
    assert torch.equal(sample(logits, metadata(*params)).token_ids, logits.argmax(-1))


def test_greedy_is_the_exact_argmax_beside_masked_rows() -> None:
    logits = torch.randn(3, 100)
    logits[1, 5:] = -math.inf
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.1),
        SamplingParams(temperature=0),
    ]
    tokens = sample(logits, metadata(*params)).token_ids
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()
    assert tokens[1] < 5


def test_logprobs_of_a_mixed_batch() -> None:
    logits = torch.randn(3, 20)
    params = [
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=5, temperature=0),
    ]
    rows = list(sample(logits, metadata(*params)).rows())
    expected = logits.log_softmax(-1)
    assert rows[1][1] is None
    for row, count in ((0, 2), (2, 5)):
        token, logprobs = rows[row]
        assert logprobs is not None and count <= len(logprobs) <= count + 1
        assert set(logprobs) == {token, *expected[row].topk(count).indices.tolist()}
        for token_id, value in logprobs.items():
            assert value == pytest.approx(float(expected[row, token_id]), abs=1e-5)
