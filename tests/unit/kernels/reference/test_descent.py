"""Panels rounded in the metric of an output factor, and their coordinate descent."""

import pytest
import torch
from bounds import SIGMAS, error, near

from exl2flow.kernels.reference.ops import TORCH_OPS

ROWS, BLOCK = 16, 32


def positive(*shape: int, rank: int | None = None) -> torch.Tensor:
    """Return symmetric positive definite matrices fp32 (..., k, k) with mean diagonal about 1."""
    k = shape[-1]
    noise = torch.randn(*shape, rank or 2 * k)
    return noise @ noise.mT / noise.shape[-1] + 0.1 * torch.eye(k)


def dense(output: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*output)


def objective(hessian: torch.Tensor, error: torch.Tensor, output: torch.Tensor) -> float:
    """Return tr(O Eᵀ H E) in fp64, O dense."""
    e = error.double()
    return float(((hessian.double() @ e @ output.double()) * e).sum())


@pytest.fixture
def upper() -> torch.Tensor:
    return torch.linalg.cholesky(positive(ROWS), upper=True)


def scales_and_ranges(m: int, *, zeros: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoder scales and half ranges fp32 (m,), for rows of size 1: some are clamped."""
    half_range = 2.0 ** torch.randint(1, 5, (m,))
    scales = (torch.rand(m) + 0.5).mul(1.5 / half_range).half().float()
    if zeros:
        scales[::11] = 0
    return scales, half_range


def values(codes: torch.Tensor, scales: torch.Tensor, half_range: torch.Tensor) -> torch.Tensor:
    return (codes.float() - half_range) * scales


def rounded_rows(rows: torch.Tensor, upper: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Return each row as it was when rounded, given the errors of the rows above."""
    w = rows.clone()
    for r in range(len(w)):
        w[r + 1 :] -= torch.outer(upper[r, r + 1 :], errors[r])
    return w


def test_rounding_in_the_identity_is_rounding_without_a_metric(upper: torch.Tensor) -> None:
    rows, (scales, half) = torch.randn(ROWS, 3 * BLOCK), scales_and_ranges(3 * BLOCK)
    identity = torch.eye(BLOCK).repeat(3, 1, 1)

    found, expected = (
        TORCH_OPS.round_panel(rows.clone(), upper, scales, half, output)
        for output in (identity, None)
    )

    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_errors_of_a_row_in_a_metric_are_fed_to_the_rows_below(upper: torch.Tensor) -> None:
    rows, (scales, half) = torch.randn(ROWS, 2 * BLOCK), scales_and_ranges(2 * BLOCK)
    output = positive(2, BLOCK)

    codes, errors = TORCH_OPS.round_panel(rows.clone(), upper, scales, half, output)

    w = rounded_rows(rows, upper, errors)
    stored = values(codes, scales, half).half().float()
    expected = (w - stored) / upper.diagonal()[:, None]
    torch.testing.assert_close(errors, expected, **near(expected, ROWS))
    assert int((codes.float() - 2 * half).max()) <= -1


def test_no_row_is_worse_in_the_metric_than_its_nearest_codes(upper: torch.Tensor) -> None:
    rows, (scales, half) = torch.randn(ROWS, 2 * BLOCK), scales_and_ranges(2 * BLOCK)
    output = positive(2, BLOCK, rank=8)

    codes, errors = TORCH_OPS.round_panel(rows.clone(), upper, scales, half, output)

    w = rounded_rows(rows, upper, errors)
    divisors = torch.where(scales > 0, scales, torch.inf)
    nearest = torch.clamp((w / divisors).round(), -half, half - 1) * scales
    one = torch.ones(1, 1)
    found, simple = (
        torch.tensor([objective(one, row[None], dense(output)) for row in w - matrix])
        for matrix in (values(codes, scales, half), nearest)
    )
    assert (found <= simple * (1 + SIGMAS * error(BLOCK, BLOCK))).all()
    assert float(found.sum()) < 0.75 * float(simple.sum())


def test_blocks_of_a_metric_are_independent(upper: torch.Tensor) -> None:
    m = 3 * BLOCK
    rows, hessian, output = torch.randn(ROWS, m), positive(ROWS), positive(3, BLOCK, rank=4)
    scales, half = scales_and_ranges(m)

    def results(c: slice, blocks: torch.Tensor) -> list[torch.Tensor]:
        codes, errors = TORCH_OPS.round_panel(rows[:, c].clone(), upper, scales[c], half[c], blocks)
        steps, gradient = codes.float() - half[c], rows[:, c].clone()
        change = TORCH_OPS.descend_panel(steps, gradient, hessian, scales[c], half[c], blocks)
        return [codes, errors, steps, change]

    together = results(slice(0, m), output)

    for number in range(3):
        columns = slice(number * BLOCK, (number + 1) * BLOCK)
        for found, expected in zip(together, results(columns, output[number, None]), strict=True):
            torch.testing.assert_close(found[:, columns], expected)


def test_row_of_few_codes_comes_near_the_best_of_all() -> None:
    scales, half = torch.full((4,), 0.7), torch.full((4,), 2.0)
    choices = torch.cartesian_prod(*4 * [torch.arange(-2.0, 2.0)])  # (256, 4)
    excess = []
    for _ in range(50):
        row, output = torch.randn(1, 4), positive(1, 4, rank=3)
        errors = (choices * scales - row).double()
        best = float(((errors @ output[0].double()) * errors).sum(dim=1).min())

        codes, _ = TORCH_OPS.round_panel(row.clone(), torch.eye(1), scales, half, output)

        error = values(codes, scales, half) - row
        excess.append(objective(torch.ones(1, 1), error, output[0]) / best - 1)
    assert min(excess) > -1e-12  # sums of doubles in another order
    # descent ends where no single code helps; that is the optimum for most rows
    assert sum(x < 1e-12 for x in excess) >= 30


@pytest.mark.parametrize("start", ["nearest", "random"])
def test_descent_of_independent_columns_is_the_naive_loop(start: str) -> None:
    hessian, target = positive(ROWS), torch.randn(ROWS, 12)
    scales, half = scales_and_ranges(12)
    anywhere = torch.randint(-20, 20, (ROWS, 12)).float()
    nearest = (target / scales.clamp(min=0.01)).round()
    steps = torch.clamp(nearest if start == "nearest" else anywhere, -half, half - 1)
    gradient = hessian @ (steps * scales - target)

    found = steps.clone()
    change = TORCH_OPS.descend_panel(found, gradient.clone(), hessian, scales, half)

    moved = 0
    v, a = steps.clone(), gradient.clone()
    for r in range(ROWS):
        for n in range(12):
            best = v[r, n]
            if scales[n] > 0:
                best = (v[r, n] - a[r, n] / (hessian[r, r] * scales[n])).round()
            best = min(max(best, -half[n]), half[n] - 1)
            moved += int(best != v[r, n])
            a[:, n] += hessian[:, r] * (best - v[r, n]) * scales[n]
            v[r, n] = best
        assert torch.equal(found[r], v[r])
    assert moved > 10
    assert torch.equal(change, (found - steps) * scales)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_descent_ends_where_no_single_code_helps(blocks: int) -> None:
    m = max(1, blocks) * BLOCK
    hessian, target = positive(ROWS, rank=ROWS), torch.randn(ROWS, m)
    output = positive(blocks, BLOCK, rank=BLOCK) if blocks else None
    whole = torch.eye(m) if output is None else dense(output)
    scales, half = scales_and_ranges(m)
    steps = torch.clamp((target / scales.clamp(min=0.01)).round(), -half, half - 1)

    for _ in range(60):
        gradient = hessian @ (steps * scales - target) @ whole
        if not TORCH_OPS.descend_panel(steps, gradient, hessian, scales, half, output).any():
            break
    else:
        pytest.fail("codes still move after 60 sweeps")

    gradient = (hessian.double() @ (steps * scales - target).double() @ whole.double()).float()
    curvature = hessian.diagonal()[:, None] * whole.diagonal() * scales.square()
    for move in (-1, 1):
        rise = curvature + 2 * move * scales * gradient
        is_open = (steps + move >= -half) & (steps + move <= half - 1) & (scales > 0)
        # a gradient that the codes of its column and block above have changed
        off = 2 * scales * near(gradient, 2 * ROWS, m + BLOCK)["atol"]
        assert ((rise + off)[is_open] > 0).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_descent_in_a_strong_metric_lowers_the_objective_with_every_sweep(bits: int) -> None:
    hessian, output = positive(ROWS, rank=4), positive(2, BLOCK, rank=4)
    target, half = torch.randn(ROWS, 2 * BLOCK), torch.full((2 * BLOCK,), 2.0 ** (bits - 1))
    scales = (2.5 / half).half().float()
    steps = torch.clamp((target / scales).round(), -half, half - 1)

    course = [objective(hessian, steps * scales - target, dense(output))]
    for _ in range(4):
        gradient = hessian @ (steps * scales - target) @ dense(output)
        TORCH_OPS.descend_panel(steps, gradient, hessian, scales, half, output)
        course.append(objective(hessian, steps * scales - target, dense(output)))

    assert course == sorted(course, reverse=True)
    assert course[1] < 0.6 * course[0]


def test_codes_keep_to_their_ranges_and_zero_scales_keep_their_codes() -> None:
    hessian, output = positive(ROWS), positive(1, BLOCK)
    half = torch.full((BLOCK,), 2.0)
    scales = torch.full((BLOCK,), 0.1)  # the best codes of all are out of range
    scales[5] = 0
    steps = torch.randint(-2, 2, (ROWS, BLOCK)).float()
    before = steps.clone()
    gradient = hessian @ (steps * scales - 3 * torch.randn(ROWS, BLOCK)) @ output[0]

    change = TORCH_OPS.descend_panel(steps, gradient, hessian, scales, half, output)

    assert (float(steps.min()), float(steps.max())) == (-2, 1)
    assert torch.equal(steps, steps.round())
    assert torch.equal(steps[:, 5], before[:, 5])
    assert not change[:, 5].any()
    assert (steps != before).float().mean() > 0.3


@pytest.mark.parametrize("blocks", [1, 4])
def test_same_input_gives_the_same_codes(blocks: int, upper: torch.Tensor) -> None:
    m = blocks * BLOCK
    rows, gradient, output = torch.randn(ROWS, m), torch.randn(ROWS, m), positive(blocks, BLOCK)
    scales, half = scales_and_ranges(m)

    def run() -> list[torch.Tensor]:
        codes, _ = TORCH_OPS.round_panel(rows.clone(), upper, scales, half, output)
        steps = codes.float() - half
        hessian = upper.T @ upper
        change = TORCH_OPS.descend_panel(steps, gradient.clone(), hessian, scales, half, output)
        return [codes, steps, change]

    assert all(map(torch.equal, run(), run()))
