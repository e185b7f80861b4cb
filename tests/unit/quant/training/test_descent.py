from collections.abc import Sequence

import pytest
import torch

from exl2flow.quant.training.descent import Descent, rate_share
from exl2flow.quant.training.trainable import Parameter


def descent(rates: Sequence[float], steps: int) -> Descent:
    values = [torch.zeros(2, requires_grad=True) for _ in rates]
    parameters = [
        Parameter(value=value, rate=rate) for value, rate in zip(values, rates, strict=True)
    ]
    return Descent(parameters, steps)


def advance(work: Descent, steps: int) -> None:
    for _ in range(steps):
        work.forget_gradients()
        for value in work.values:
            value.grad = torch.ones_like(value)
        work.step()


def test_rates_rise_and_fall() -> None:
    shares = [rate_share(step, 100) for step in range(100)]

    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0.02 < shares[-1] < 0.03
    assert [rate_share(0, 1), rate_share(0, 2)] == [1.0, 1.0]


def test_each_parameter_has_its_rate_and_codes_keep_theirs() -> None:
    work = descent([0.1, 0.3], 8)
    work.parameters = [work.parameters[0], Parameter(value=work.values[1], rate=0.3, is_code=True)]
    for value in work.values:
        value.grad = torch.ones_like(value)

    work.step(distance=0.5)

    torch.testing.assert_close(work.values[0].detach(), torch.full((2,), -0.05))
    torch.testing.assert_close(work.values[1].detach(), torch.full((2,), -0.3))


def test_a_restored_descent_goes_on_as_before() -> None:
    whole, begun, again = descent([0.1], 8), descent([0.1], 8), descent([0.1], 8)
    advance(whole, 3)
    whole.keep()
    advance(whole, 5)
    advance(begun, 3)
    begun.keep()
    advance(begun, 3)
    with torch.no_grad():
        for tensor, saved in zip(again.changing, begun.changing, strict=True):
            tensor.copy_(saved)

    again.resume(6)
    advance(again, 2)

    assert all(map(torch.equal, again.changing, whole.changing))
    again.recall()
    assert torch.equal(again.values[0], whole.best[0])
