"""Refined matrices: what gets better, what stays, and what the parts of a round do."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from exl2flow.kernels import get_ops, times_output
from exl2flow.model import QuantParams
from exl2flow.quant.measure.candidates import parse_params
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.rounding.hessian import HessianFactor, MixedHessian, factor

K, N = 160, 96
PARAMS = [
    parse_params(cell)
    for cell in ("2 g64", "3/2@0.25/0.75 g64", "3 g128", "8/4/3@0.05/0.1/0.85 g32", "6 g32")
]


def metric_of(item: HessianFactor, output: torch.Tensor | None = None) -> Metric:
    return Metric(hessian=item.hessian.matrix(), output=output)


def correlated(k: int, *, rank: int, size: float = 1.0) -> torch.Tensor:
    """Return a positive definite matrix fp32 (k, k)."""
    noise = torch.randn(k, rank) * size
    return noise @ noise.T / rank + 0.1 * torch.eye(k)


@pytest.fixture
def item() -> HessianFactor:
    return factor(MixedHessian.plain(correlated(K, rank=80)), damping=0.05, name="test")


@pytest.fixture
def output() -> torch.Tensor:
    return torch.stack([correlated(32, rank=8) for _ in range(N // 32)])


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(K, N) * 0.1


def rounded(weight: torch.Tensor, params: QuantParams, item: HessianFactor) -> RoundedMatrix:
    job = RoundingJob(weight=weight, params=params)
    return next(round_matrices([job], item, search="column"))


def exact(matrix: RoundedMatrix) -> torch.Tensor:
    """Return what codes and scales stand for before fp16 rounds it, fp64 (k, n) in act-order."""
    scales = get_ops("cpu").decode_scales(matrix.scale_codes, matrix.max_scales).double()
    steps = [
        (matrix.codes[g.start : g.start + g.rows].double() - 2 ** (g.bits - 1)) * scales[index]
        for index, g in enumerate(matrix.groups)
    ]
    return torch.cat(steps)


def loss(
    values: torch.Tensor, weight: torch.Tensor, item: HessianFactor, output: torch.Tensor | None
) -> float:
    """Return tr(O Eᵀ H E) of values fp64 (k, n) in act-order."""
    error = values - weight.double()[item.perm]
    whole = torch.eye(error.shape[1]) if output is None else torch.block_diag(*output)
    return float(((item.hessian.matrix().double() @ error @ whole.double()) * error).sum())


def check_same(found: RoundedMatrix, expected: RoundedMatrix) -> None:
    for name in ("codes", "scale_codes", "max_scales", "perm"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("in_metric", [False, True])
def test_every_step_of_every_round_lowers_the_objective(
    in_metric: bool,
    params: QuantParams,
    weight: torch.Tensor,
    item: HessianFactor,
    output: torch.Tensor,
) -> None:
    blocks = output if in_metric else None
    metric = metric_of(item, blocks)
    matrix = rounded(weight, params, item)

    course = [loss(exact(matrix), weight, item, blocks)]
    for _ in range(3):
        for sweeps in (0, 1, 2):  # a refit alone; with one sweep; with two
            step = refine(matrix, weight, metric, rounds=1, sweeps=sweeps)
            course.append(loss(exact(step), weight, item, blocks))
        matrix = step

    # the gradient is summed in fp32
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in pairwise(course))
    assert course[3] < (0.75 if in_metric else 0.97) * course[0]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_refining_lowers_the_error_of_the_decoded_matrix(
    params: QuantParams, weight: torch.Tensor, item: HessianFactor, output: torch.Tensor
) -> None:
    start = rounded(weight, params, item)

    found = refine(start, weight, metric_of(item, output), rounds=2, sweeps=2)

    before, after = (
        loss(matrix.dequantize().double()[item.perm], weight, item, output)
        for matrix in (start, found)
    )
    assert after < 0.75 * before


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_layout_and_order_stay_and_the_matrix_can_be_stored(
    params: QuantParams, weight: torch.Tensor, item: HessianFactor, output: torch.Tensor
) -> None:
    start = rounded(weight, params, item)

    found = refine(start, weight, metric_of(item, output), rounds=1, sweeps=1)

    assert found.groups == start.groups == params.groups(K)
    assert torch.equal(found.perm, start.perm)
    for name in ("codes", "scale_codes", "max_scales"):
        assert getattr(found, name).dtype == getattr(start, name).dtype
        assert getattr(found, name).shape == getattr(start, name).shape
    packed = found.pack(None)
    assert torch.equal(packed.dequantize(), found.dequantize())
    assert packed.total_bits == start.pack(None).total_bits


def test_start_and_weight_are_not_changed(
    weight: torch.Tensor, item: HessianFactor, output: torch.Tensor
) -> None:
    start, metric = (rounded(weight, PARAMS[1], item), metric_of(item, output))
    copies = replace(
        start,
        codes=start.codes.clone(),
        scale_codes=start.scale_codes.clone(),
        max_scales=start.max_scales.clone(),
    )
    before = [tensor.clone() for tensor in (weight, metric.hessian, output)]

    found = refine(start, weight, metric, rounds=2, sweeps=1)

    check_same(start, copies)
    assert all(map(torch.equal, (weight, metric.hessian, output), before))
    assert not torch.equal(found.codes, start.codes)


def test_no_rounds_return_the_matrix_as_it_is(weight: torch.Tensor, item: HessianFactor) -> None:
    start = rounded(weight, PARAMS[3], item)

    check_same(refine(start, weight, metric_of(item), rounds=0, sweeps=2), start)


@pytest.mark.parametrize("in_metric", [False, True])
def test_refit_alone_keeps_the_codes_and_finds_scales_that_were_spoiled(
    in_metric: bool, weight: torch.Tensor, item: HessianFactor, output: torch.Tensor
) -> None:
    blocks = output if in_metric else None
    start = rounded(weight, parse_params("4 g32"), item)
    spoiled = replace(start, max_scales=(start.max_scales.float() * 1.12).half())

    found = refine(spoiled, weight, metric_of(item, blocks), rounds=3, sweeps=0)

    assert torch.equal(found.codes, start.codes)
    good, bad, refitted = (
        loss(exact(matrix), weight, item, blocks) for matrix in (start, spoiled, found)
    )
    assert bad > 2 * good
    assert refitted < 1.02 * good


def test_refit_finds_the_scales_that_a_weight_was_made_with() -> None:
    codes = torch.randint(0, 16, (32, 32)).to(torch.uint8)
    wanted = torch.rand(32) * 0.5 + 0.5  # scales that no codes of the maximum below stand for
    weight = torch.zeros(32, 32)
    small = factor(MixedHessian.plain(torch.eye(32)), damping=0.05, name="test")
    weight[small.perm] = (codes.float() - 8) * wanted
    start = RoundedMatrix(
        codes=codes,
        groups=parse_params("4 g32").groups(32),
        scale_codes=torch.full((1, 32), 12, dtype=torch.uint8),
        max_scales=torch.tensor([1.0]).half(),
        perm=small.perm,
    )

    found = refine(start, weight, Metric(hessian=small.hessian.matrix()), rounds=4, sweeps=0)

    scales = get_ops("cpu").decode_scales(found.scale_codes, found.max_scales)[0].float()
    # neighbouring squares differ by an eighth or less from 13² on: half of that at most is missed
    assert float((scales / wanted - 1).abs().max()) < 0.08


def test_group_whose_scales_decode_to_zero_stays_so_and_disturbs_nothing(
    weight: torch.Tensor, item: HessianFactor
) -> None:
    start = rounded(weight, parse_params("4 g32"), item)
    maxima = start.max_scales.clone()
    maxima[1] = 0
    dead = replace(start, max_scales=maxima)

    found = refine(dead, weight, metric_of(item), rounds=1, sweeps=1)

    assert not found.dequantize()[item.perm][32:64].any()
    losses = [loss(exact(matrix), weight, item, None) for matrix in (dead, found)]
    assert losses[1] < losses[0]


def test_identity_metric_is_no_metric(weight: torch.Tensor, item: HessianFactor) -> None:
    start, hessian = rounded(weight, PARAMS[1], item), item.hessian.matrix()
    identity = torch.eye(32).repeat(3, 1, 1)

    found, expected = (
        refine(start, weight, Metric(hessian=hessian, output=blocks), rounds=2, sweeps=2)
        for blocks in (identity, None)
    )

    # sums of fp32 in another order may move single codes
    assert float((found.codes != expected.codes).float().mean()) < 0.01
    losses = [loss(exact(matrix), weight, item, None) for matrix in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_padded_columns_stay_zero(weight: torch.Tensor, item: HessianFactor) -> None:
    weight[:, 80:] = 0
    output = correlated(N, rank=8)
    output[80:] = 0  # no gradient: only what damping adds
    output[:, 80:] = 0
    output[80:, 80:] = 0.3 * torch.eye(16)
    start = rounded(weight, PARAMS[1], item)

    found = refine(start, weight, metric_of(item, output[None]), rounds=2, sweeps=2)

    assert not found.dequantize()[:, 80:].any()


def test_same_input_gives_the_same_bytes(
    weight: torch.Tensor, item: HessianFactor, output: torch.Tensor
) -> None:
    start, metric = (rounded(weight, PARAMS[1], item), metric_of(item, output))

    first, second = (refine(start, weight, metric, rounds=2, sweeps=2) for _ in range(2))

    check_same(first, second)


def test_metric_multiplies_rows_with_the_output_factor(output: torch.Tensor) -> None:
    x = torch.randn(5, N)

    torch.testing.assert_close(times_output(x, output), x @ torch.block_diag(*output))
    assert torch.equal(times_output(x, None), x)
