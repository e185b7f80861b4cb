"""Bounds for results that sums in another order, on another processor or in more threads, change.

A partial sum of n terms of random sign is about as large as the result, and each of the n additions
rounds it by up to half a unit in the last place, u. Errors of random sign add in quadrature, so the
result is off by √n u of its size, and sums that feed each other, of n₁, n₂, … terms, leave

    error = u √(n₁ + n₂ + …) · size        u = eps / 2; size: root mean square of the results

One bound holds for the largest of up to 10⁶ errors, whose distribution reaches 5 of these, and for
the difference of two results (√2): `SIGMAS` = 8 of them. A share or a mean needs half as many,
because terms of one result are not quite independent.

Elements that are stored in steps move by one where a boundary lies between the two results. The
share of elements that move is the mean error over the step.
"""

import math
from typing import Any

import torch

from exl2flow.kernels import Element
from exl2flow.kernels.interface.cache_formats import RUN
from exl2flow.model import ModelSpec
from exl2flow.model.config.spec import AttentionSpec

SIGMAS = 8
# steps of a stored element in its size, at most; a rotated one sums 32, whose fp16 steps add up
STEPS = {
    Element.FULL: 0.0,
    Element.HALF: 2.0**11,
    Element.UPPER_BYTE: 2.0**3,
    Element.ROTATED_8: 2.0**7 * math.sqrt(RUN),
    Element.ROTATED_6: 2.0**5 * math.sqrt(RUN),
    Element.ROTATED_4: 2.0**3 * math.sqrt(RUN),
}


def error(*terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the error of sums of so many terms that feed each other, relative to their size."""
    return torch.finfo(dtype).eps / 2 * math.sqrt(sum(terms))


def near(expected: torch.Tensor, *terms: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the tolerances of `assert_close` for sums of so many terms that feed each other.

    dtype: in which they are added, or in which the results are stored if that is coarser.
    """
    size = float(expected.detach().double().square().mean().sqrt())
    return {
        "rtol": SIGMAS * error(1, dtype=dtype),
        "atol": SIGMAS * error(*terms, dtype=dtype) * size,
    }


def terms_of(spec: ModelSpec, positions: int) -> int:
    """Return the terms of all sums from a token to its logits, which sees so many positions."""
    each = (
        2 * spec.hidden_size  # norm; q, k or v
        + (
            attention.head_dim if isinstance(attention, AttentionSpec) else attention.key_dim
        )  # a score
        + positions  # a mean of values
        + attention.width  # o
        + 2 * spec.hidden_size  # norm; gate or up
        + spec.widest_mlp  # down
        for attention in spec.attentions
    )
    return sum(each) + 2 * spec.hidden_size  # norm; head


def near_logits(expected: torch.Tensor, spec: ModelSpec, positions: int) -> dict[str, Any]:
    """Return tolerances for comparing logits at a context of `positions` tokens.

    Layers with a state subtract logarithms of decays, which reach 1,300 in a chunk of 64 tokens of
    the tests' models. Rounding those changes the factor of a token by up to 8e-5, however few
    terms are added.
    """
    if spec.deltas:
        return {"rtol": 0.0, "atol": 1e-4}
    return near(expected, terms_of(spec, positions))


def moved_share(element: Element, terms: int) -> float:
    """Return the largest share of stored elements that sums in another order move by a step."""
    return SIGMAS / 2 * error(terms) * STEPS[element]
