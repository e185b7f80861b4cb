"""How a draw decides among candidates."""

import math
import random
from dataclasses import replace

import torch
from sampled import PLAIN, sample, slots_of

from exl2flow.engine.sampling import Kind
from exl2flow.engine.sampling import sample as sample_rows

LAST_DRAW = 1 - 2**-53  # the greatest below 1


def way(draw: float, token: int) -> float:
    """Return how far a token has to go, by SplitMix64 in whole numbers."""
    x = (int(draw * 2**53) + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return -math.log(((x ^ x >> 31) // 2**12 + 0.5) / 2**52)


def test_the_token_is_drawn_that_arrives_first() -> None:
    shares, rng = [0.2, 0.5, 0.3], random.Random(0)
    for draw in (0.0, LAST_DRAW, *(rng.random() for _ in range(100))):
        times = [way(draw, token) / share for token, share in enumerate(shares)]

        found = sample(torch.tensor(shares).log(), PLAIN, draw)

        assert found == times.index(min(times))


def test_little_noise_changes_few_tokens() -> None:
    """At most about as many as the two distributions must differ by."""
    generator, rows = torch.Generator().manual_seed(2), 4000
    logits = torch.randn(rows, 300, generator=generator)
    noisy = logits + 1e-3 * torch.randn(rows, 300, generator=generator)
    draws = torch.rand(rows, generator=generator, dtype=torch.float64)
    settings = [replace(PLAIN, top_k=50)]

    first, second = (
        sample_rows(x, slots_of(settings * rows, 300), draws, Kind.of(settings)).ids
        for x in (logits, noisy)
    )

    assert 0 < (first != second).sum() < 10
