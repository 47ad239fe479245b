"""The sampling parameters in plain NumPy, one request at a time: the reference of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from common import SamplingParams
from milestones.lab.instruments.hash_chain import uniform
from milestones.lab.instruments.hash_model import LOGIT, VOCAB_SIZE, HashChain


def adjusted(
    logits: Sequence[float] | np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    end_token_ids: Collection[int] = (),
) -> np.ndarray:
    """Return the logits of the next token after bias, penalties and `min_tokens`: [V] float32."""
    changed = np.array(logits, np.float32)
    for token, bias in (params.logit_bias or {}).items():
        changed[token] += np.float32(bias)
    counts = Counter(output)
    if params.repetition_penalty != 1:
        for token in {*prompt, *output}:
            penalty = np.float32(params.repetition_penalty)
            is_positive = changed[token] > 0
            changed[token] = changed[token] / penalty if is_positive else changed[token] * penalty
    for token, count in counts.items():
        changed[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        changed[token] -= np.float32(params.presence_penalty)
    if len(output) < params.min_tokens:
        changed[[*end_token_ids, *params.stop_token_ids]] = -np.inf
    return changed


def chosen(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """Return the token that is chosen from adjusted logits, without top-k, top-p and min-p."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / np.float32(params.temperature)
    cumulative = np.exp(scaled).astype(np.float64).cumsum()
    place = uniform(seed % 2**64, position) * cumulative[-1]
    return int(np.searchsorted(cumulative, place, side="right"))


def hash_answer(prompt: list[int], params: SamplingParams, eos: Collection[int]) -> list[int]:
    """Return the output tokens of the hash model, from the token list alone."""
    chain, output = HashChain(prompt), list[int]()
    while len(output) < params.max_tokens:
        logits = np.zeros(VOCAB_SIZE)
        logits[chain.next_token()] = LOGIT
        changed = adjusted(logits, prompt, output, params, eos)
        output.append(chosen(changed, params, params.seed or 0, chain.num_tokens))
        chain.feed(output[-1])
        is_eos = output[-1] in eos and not params.ignore_eos
        if is_eos or output[-1] in params.stop_token_ids:
            break
    return output
