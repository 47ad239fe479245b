"""Top-k, top-p and min-p keep exactly the tokens of their definition, a sorted list."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import Request, SamplingParams
from common.sampling.adjustments import Adjustments, adjust
from common.sampling.filters import Filters, apply_filters, weights
from common.sampling.sampler import SamplingMetadata, map_tensors, sample
from tests.exercises.by_hand import request_with


def request(params: SamplingParams) -> Request:
    return request_with(params, end_token_ids=np.array([3]))


def kept_by_filters(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return which tokens of each row have a finite logit: [n, V] bool."""
    filters = Filters.from_requests([request(p) for p in params], "cpu")
    return apply_filters(logits, filters).isfinite()


def kept_by_sorting(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """Return the tokens that are kept, from the definition, in Python's integers of any size."""
    weight = weights(logits[None])[0].tolist()
    values = logits.tolist()
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: params.top_k or None]
    total = sum(weight[token] for token in order)
    share = min(math.ceil(total * params.top_p), total) if params.top_p < 1 else math.inf
    before, kept = 0, list[int]()
    for token in order:
        if kept and before >= share:
            break
        kept.append(token)
        before += weight[token]
    least = float(np.float32(math.log(params.min_p))) if params.min_p else -math.inf
    return sorted(token for token in kept if values[token] >= least)


def kept_in_float64(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens top-p keeps by sums of float64 in sorted order, and the sums before."""
    sorted_logits, order = logits.sort(descending=True, stable=True)
    probs = sorted_logits.double().softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(0, order, before < top_p), before


rows = st.tuples(
    st.integers(0, 2**32),  # seed of the logits
    st.sampled_from([0.0, 0.3, 2.0, 8.0, 60.0]),  # their scale
    st.booleans(),  # in half precision: many are equal
    st.sampled_from([0, 0, 0, 1, 2, 7, 40, 10**9]),  # top_k
    st.sampled_from([1.0, 0.9999999, 0.95, 0.5, 1e-3, 1e-300]) | st.floats(1e-6, 1.0),
    st.sampled_from([0.0, 0.0, 1e-4, 0.3, 1.0]),
)


def logits_of(seed: int, scale: float, is_half: bool, size: int) -> torch.Tensor:
    """Return the logits of a row: the largest is 0, and a third of the tokens cannot be drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * scale
    logits = logits.bfloat16().float() if is_half else logits
    logits[torch.rand(size, generator=generator) < 0.3] = -math.inf
    logits[seed % size] = logits.amax() if logits.amax().isfinite() else 0.0
    return logits - logits.amax()


@settings(max_examples=150)
@given(rows=st.lists(rows, min_size=1, max_size=5), size=st.sampled_from([1, 2, 50, 300]))
def test_the_kept_tokens_are_those_of_the_sorted_list(
    rows: list[tuple[int, float, bool, int, float, float]], size: int
) -> None:
    """Bit for bit, for each row of a mixed batch: of equally likely tokens, lower ids are kept."""
    logits = torch.stack([logits_of(*row[:3], size) for row in rows])
    params = [SamplingParams(top_k=k, top_p=p, min_p=m) for *_, k, p, m in rows]
    kept = kept_by_filters(logits, params)
    for i, p in enumerate(params):
        expected = [t for t in kept_by_sorting(logits[i], p) if logits[i, t].isfinite()]
        assert kept[i].nonzero().flatten().tolist() == expected, f"I2: row {i}, {p}"


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32), scale=st.sampled_from([0.1, 2.5, 9.0]), is_half=st.booleans(),
    top_p=st.floats(0.01, 1.0, exclude_max=True),
)  # fmt: skip
def test_a_whole_vocabulary(seed: int, scale: float, is_half: bool, top_p: float) -> None:
    """The integers agree with sums of float64, except where a sum is top_p to within rounding."""
    logits = logits_of(seed, scale, is_half, 49_152)
    params = SamplingParams(top_p=top_p)
    kept = kept_by_filters(logits[None], [params])[0]
    assert kept.nonzero().flatten().tolist() == kept_by_sorting(logits, params)
    in_floats, before = kept_in_float64(logits, top_p)
    different = int((kept != in_floats).sum())
    near = int(((before - top_p).abs() < 1e-6).sum())
    assert different <= near, f"{different} tokens differ, and {near} lie on the edge"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_invalid_row_does_not_disturb_the_others(bad: float) -> None:
    """NaN, +inf or only -inf: that row is invalid, and the others get the tokens they get alone."""
    params = [SamplingParams(top_p=0.8, seed=i, top_k=9 * (i == 2)) for i in range(4)]
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 3
    for invalid in range(4):
        broken = logits.clone()
        broken[invalid, slice(None) if bad < 0 else 5] = bad
        output = sample(broken, SamplingMetadata.from_requests([request(p) for p in params], "cpu"))
        assert output.is_valid.tolist() == [i != invalid for i in range(4)]
        assert 0 <= int(output.token_ids[invalid]) < 100
        for i in set(range(4)) - {invalid}:
            alone = SamplingMetadata.from_requests([request(params[i])], "cpu")
            assert output.token_ids[i] == sample(logits[i : i + 1], alone).token_ids[0]


def test_no_shape_depends_on_data_and_the_host_never_waits() -> None:
    """A GPU samples without a gap. A tensor without content refuses everything that waits."""
    params = [
        SamplingParams(top_p=0.9, seed=1),
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1, seed=2, presence_penalty=1.0),
        SamplingParams(min_p=0.1, seed=3, logit_bias={4: 1.0}, min_tokens=3, logprobs=2),
        SamplingParams(temperature=0, repetition_penalty=2.0),
    ]
    metadata = SamplingMetadata.from_requests([request(p) for p in params], "cpu")
    assert isinstance(metadata.adjustments, Adjustments) and metadata.draws is not None
    without_content = map_tensors(metadata, lambda tensor: tensor.to("meta"))
    logits = torch.empty(4, 512, device="meta")
    with pytest.raises((NotImplementedError, RuntimeError)):
        logits[logits > 0]  # what depends on data fails here
    assert without_content.adjustments is not None
    assert adjust(logits, without_content.adjustments).shape == (4, 512)
    assert sample(logits, without_content).token_ids.shape == (4,)
