"""The hashes of the hash model in plain Python, and its answer to a prompt: see `hash_model`.

Layer 0 stores a hash of (token, position). Layer 1 stores a hash of the sum over all slots of layer
0 that its query can see. The next token is a hash of the sum over all slots of layer 1 that the
last query can see. Any wrong slot, stale row, wrong mask or wrong position in the past changes the
answer. `uniform` is the random number with which a sampler draws from it.
"""

from __future__ import annotations

from typing import Any

PRIME = 2**31 - 1
VOCAB_SIZE = 259
LAYERS = 2
MASK = 2**64 - 1


def mix(value: Any, salt: int) -> Any:
    """Return a hash of integers below PRIME, for Python ints and int64 tensors alike."""
    value = (value * 48271 + salt * 69621 + 12345) % PRIME
    value = (value * (value % 65521 + 1)) % PRIME
    return (value * 16807 + salt) % PRIME


class HashChain:
    """The state of the model after a list of tokens, in plain Python: constant work per token."""

    def __init__(self, tokens: list[int]) -> None:
        self.num_tokens = 0
        self.sums = [0] * LAYERS  # of what each layer has stored, modulo PRIME
        for token in tokens:
            self.feed(token)

    def feed(self, token: int) -> None:
        """Append a token."""
        position, self.num_tokens = self.num_tokens, self.num_tokens + 1
        self.sums[0] = (self.sums[0] + mix(token * 1009 + position, 1)) % PRIME
        for layer in range(1, LAYERS):
            stored = mix(self.sums[layer - 1] + position, 2)
            self.sums[layer] = (self.sums[layer] + stored) % PRIME

    def next_token(self) -> int:
        """Return the most likely next token."""
        token: int = mix(self.sums[-1], 3) % VOCAB_SIZE
        return token


def expected_tokens(prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    """Return the greedy continuation of a prompt, computed from the token list alone."""
    chain, output = HashChain(prompt), list[int]()
    while len(output) < max_tokens and (not output or output[-1] != eos):
        output.append(chain.next_token())
        chain.feed(output[-1])
    return output


def uniform(seed: int, position: int) -> float:
    """Return the sampler's random number in [0, 1), in plain Python: 48 bits of splitmix64."""
    bits = _splitmix64((_splitmix64(seed) + position) & MASK)
    return ((bits >> 16) & (2**48 - 1)) / 2.0**48


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
