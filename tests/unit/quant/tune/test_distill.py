"""What a step of distillation depends on."""

import pytest
import torch

from exl2flow.quant.tune.distill import Batches, rate_share


def test_batches_follow_from_the_step_alone() -> None:
    rows = torch.arange(5 * 100).view(5, 100)

    first, again = ([Batches(rows, tokens=299, seed=s)(i) for i in range(5)] for s in (3, 3))
    other = [Batches(rows, tokens=299, seed=4)(i) for i in range(5)]

    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    taken = [int(row[0]) // 100 for batch in first for row in batch]
    assert sorted(taken) == sorted([*range(5)] * 2)
    assert sorted(taken[:5]) == [*range(5)]  # all of them before any comes again
    assert {batch.shape for batch in first} == {(2, 100)}
    assert Batches(rows, tokens=32, seed=3)(0).shape == (1, 100)


def test_rates_rise_and_fall() -> None:
    shares = [rate_share(step, 100) for step in range(100)]

    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0.02 < shares[-1] < 0.03
    assert [rate_share(0, 1), rate_share(0, 2)] == [1.0, 1.0]
