"""Rejection sampling of drafts, as in the papers. The engine does not use it: compare it.

It accepts more drafts than the comparison of tokens does, because a draft that the model would have
drawn with some probability may be accepted although the model's own draw is another token. The
tokens have the same distribution, but they are other tokens: a request's text then depends on the
drafts, and so on the number of steps and on the neighbours (I2 is lost).
"""

from __future__ import annotations

import torch


def verify(
    target: torch.Tensor, draft: torch.Tensor, drafts: list[int], uniforms: torch.Tensor
) -> list[int]:
    """Return the accepted drafts and one more token.

    target: [k + 1, V] probabilities of the model at each position. draft: [k, V] probabilities that
    each draft was really drawn with. uniforms: [k + 1, 2] numbers in [0, 1): for each position one
    for the test and one for the draw, so that they are independent.
    """
    for place, token in enumerate(drafts):
        p, q = target[place], draft[place]
        if uniforms[place, 0] * q[token] >= p[token]:  # accept with probability min(1, p / q)
            rest = (p - q).clamp(min=0)  # what accepted drafts leave of the distribution
            return [*drafts[:place], _draw(rest / rest.sum(), uniforms[place, 1])]
    return [*drafts, _draw(target[-1], uniforms[-1, 1])]


def _draw(probabilities: torch.Tensor, uniform: torch.Tensor) -> int:
    """Draw a token by inverting the cumulative distribution."""
    cumulative = probabilities.double().cumsum(-1)
    return int(torch.searchsorted(cumulative, uniform.double() * cumulative[-1], right=True))
