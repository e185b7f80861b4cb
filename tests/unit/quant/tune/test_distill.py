"""What a step of distillation depends on."""

import pytest
import torch

from exl2flow.quant.tune.distill import Crops, rate_share


def test_crops_follow_from_the_step_alone() -> None:
    rows = torch.arange(5 * 100).view(5, 100)
    rows[:, 0] = 7777

    first, again = ([Crops(rows, tokens=40, seed=s, bos=7777)(i) for i in range(5)] for s in (3, 3))
    other = [Crops(rows, tokens=40, seed=4, bos=7777)(i) for i in range(5)]

    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    assert sorted(int(crop[0, 1]) // 100 for crop in first) == [0, 1, 2, 3, 4]
    for crop in first:
        assert crop.shape == (1, 40)
        assert int(crop[0, 0]) == 7777
        assert torch.equal(crop[0, 1:].diff(), torch.ones(38, dtype=torch.int64))


def test_rates_rise_and_fall() -> None:
    shares = [rate_share(step, 100) for step in range(100)]

    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0.05 < shares[-1] < 0.06
    assert [rate_share(0, 1), rate_share(0, 2)] == [1.0, 1.0]
