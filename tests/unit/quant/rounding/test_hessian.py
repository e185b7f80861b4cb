"""Hessians: what is summed, how it is factored, and the remedies when it cannot be."""

import logging

import pytest
import torch
from bounds import SIGMAS, error, near

from exl2flow.quant.rounding.hessian import (
    ATTEMPTS,
    LEAF,
    LEAST_DAMPING,
    HessianFactor,
    HessianSum,
    MixedHessian,
    mixed,
    relative_error,
    upper_factor,
)
from exl2flow.quant.rounding.hessian import factor as factor_with

K = 48
DAMPING = 0.12  # exllamav2's


def factor(hessian: torch.Tensor, *, damping: float = DAMPING) -> HessianFactor:
    return factor_with(MixedHessian.plain(hessian), damping=damping, name="layers.7.q_proj")


def whole(hessian: MixedHessian) -> torch.Tensor:
    return hessian.in_order(torch.arange(K))


def positive_definite(k: int = K) -> torch.Tensor:
    x = torch.randn(4 * k, k) * torch.linspace(0.2, 3, k)[torch.randperm(k)]
    return x.T @ x / 4


def with_negative_eigenvalue(share: float) -> torch.Tensor:
    """Return fp32 (k, k) with one eigenvalue of `-share` times the damping of its diagonal."""
    basis = torch.linalg.qr(torch.randn(K, K, dtype=torch.float64)).Q
    # diag(H) has the mean of the eigenvalues: (K - 1 - share * DAMPING * mean) / K = mean
    mean = (K - 1) / (K + share * DAMPING)
    values = torch.ones(K, dtype=torch.float64)
    values[0] = -share * DAMPING * mean
    return (basis * values @ basis.T).float()


def damped(
    hessian: torch.Tensor, perm: torch.Tensor, times: int = 1, *, share: float = DAMPING
) -> torch.Tensor:
    ordered = hessian[perm][:, perm].double()
    damping = max(share * float(ordered.diagonal().mean()), LEAST_DAMPING)
    return ordered + times * damping * torch.eye(len(perm), dtype=torch.float64)


def check_inverse(found: torch.Tensor, matrix: torch.Tensor) -> None:
    """Check an inverse from a factor, an inverse and a factor in fp32; each feeds the next."""
    most = SIGMAS * error(3 * len(matrix)) * float(torch.linalg.cond(matrix))
    torch.testing.assert_close(found @ matrix, torch.eye(len(matrix)).double(), rtol=0, atol=most)


def test_least_damping_and_attempts_are_those_of_the_original() -> None:
    assert (LEAST_DAMPING, ATTEMPTS) == (1e-5, 10)


def test_sum_is_divided_by_rows_not_by_tokens() -> None:
    rows = [torch.randn(1, tokens, K) for tokens in (5, 9, 200)]
    total = HessianSum(K)

    for row in rows:
        total.add(row)

    flat = torch.cat([row.double().flatten(0, 1) for row in rows])
    expected = (flat.T @ flat / 3).float()
    torch.testing.assert_close(total.mean(), expected, **near(expected, len(flat)))


def test_half_precision_inputs_are_summed_in_fp32() -> None:
    x = torch.full((2048, K), 8.0, dtype=torch.float16)  # the sum is beyond fp16
    total = HessianSum(K)

    total.add(x)

    assert total.mean().dtype == torch.float32
    assert total.mean().unique().tolist() == [2048 * 64.0]


def test_without_data_the_hessian_is_the_identity() -> None:
    assert torch.equal(HessianSum(K).mean(), torch.eye(K))


def test_in_features_are_ordered_by_falling_diagonal() -> None:
    hessian = positive_definite()

    perm = factor(hessian).perm

    assert sorted(perm.tolist()) == list(range(K))
    ordered = hessian.diagonal()[perm]
    assert torch.equal(ordered, ordered.sort(descending=True).values)


def test_equal_in_features_keep_their_order() -> None:
    assert factor(torch.eye(K)).perm.tolist() == list(range(K))


@pytest.mark.parametrize("share", [0.03, DAMPING])
def test_factor_is_the_upper_cholesky_factor_of_the_damped_inverse(share: float) -> None:
    hessian = positive_definite()

    item = factor(hessian, damping=share)

    assert torch.equal(item.upper, item.upper.triu())
    assert (item.upper.diagonal() > 0).all()
    upper = item.upper.double()
    check_inverse(upper.T @ upper, damped(hessian, item.perm, share=share))


@pytest.mark.parametrize("k", [LEAF - 32, LEAF, LEAF + 32, 2 * LEAF + 96])
def test_factor_of_many_rows_is_as_exact_as_one_of_few(k: int) -> None:
    hessian = positive_definite(k).double()

    upper = upper_factor(hessian.float().flip(0, 1)).double()

    assert torch.equal(upper, upper.triu())
    expected = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    assert (upper - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("times", [1, 3])
def test_damped_hessian_is_the_one_that_was_factored(times: int) -> None:
    hessian = positive_definite() if times == 1 else with_negative_eigenvalue(times - 0.5)

    item = factor(hessian)

    expected = damped(hessian, item.perm, times)
    torch.testing.assert_close(item.hessian.matrix(), expected.float())
    assert item.hessian.added == pytest.approx(
        float(expected[0, 0] - hessian.diagonal().max()),
        abs=torch.finfo(torch.float32).eps * float(expected[0, 0]),  # of a difference
    )


def test_ordinary_hessian_needs_no_remedy(caplog: pytest.LogCaptureFixture) -> None:
    item = factor(positive_definite())

    assert item.remedy == ""
    assert caplog.records == []


def test_hessian_of_few_tokens_is_made_regular_by_its_damping() -> None:
    x = torch.randn(3, K)

    item = factor(x.T @ x)

    assert item.remedy == ""
    assert item.upper.isfinite().all()


def test_hessian_of_zeros_gets_the_least_damping() -> None:
    item = factor(torch.zeros(K, K))

    assert item.remedy == ""
    expected = torch.eye(K) * LEAST_DAMPING**-0.5
    torch.testing.assert_close(item.upper, expected)


@pytest.mark.parametrize("times", [2, 3, ATTEMPTS])
def test_indefinite_hessian_is_damped_again_until_it_has_a_factor(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    hessian = with_negative_eigenvalue(times - 0.5)

    item = factor(hessian)

    assert item.remedy == f"damping x{times}"
    upper = item.upper.double()
    check_inverse(upper.T @ upper, damped(hessian, item.perm, times))
    assert [record.getMessage() for record in caplog.records] == [
        f"projection=layers.7.q_proj remedy=damping x{times}"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_hessian_beyond_fp32_is_factored_in_fp64(caplog: pytest.LogCaptureFixture) -> None:
    hessian = torch.eye(K)
    hessian[7, 7] = 3.4e38  # the damping carries it beyond the largest fp32

    item = factor(hessian)

    assert item.remedy == "fp64 factor"
    assert item.upper.dtype == torch.float32
    expected = damped(hessian, item.perm).diagonal().rsqrt().float()
    torch.testing.assert_close(item.upper.diagonal(), expected)
    assert "remedy=fp64 factor" in caplog.text


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -1e6])
def test_hopeless_hessian_is_replaced_by_the_identity(
    entry: float, caplog: pytest.LogCaptureFixture
) -> None:
    hessian = positive_definite()
    hessian[5, 5] = entry

    item = factor(hessian)

    assert item.remedy == "identity Hessian"
    assert torch.equal(item.upper, torch.eye(K))
    assert torch.equal(item.hessian.matrix(), torch.eye(K))  # what refining measures errors in
    assert sorted(item.perm.tolist()) == list(range(K))
    assert "remedy=identity Hessian" in caplog.text


def test_relative_error_is_that_of_the_outputs() -> None:
    x, weight = torch.randn(100, K), torch.randn(K, 8)
    rounded = weight + 0.01 * torch.randn(K, 8)
    total = HessianSum(K)
    total.add(x)
    hessian = total.mean()

    found = relative_error(hessian, weight, rounded)

    expected = float((x @ (weight - rounded)).norm() / (x @ weight).norm())
    assert found == pytest.approx(expected, rel=SIGMAS * error(len(x), 2 * K))
    assert relative_error(hessian, weight, weight) == 0.0
    assert relative_error(hessian, torch.zeros(K, 8), torch.zeros(K, 8)) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_mixed_hessian_is_the_mean_of_both_at_equal_size(share: float) -> None:
    hessian, weighted = positive_definite(), 1e-9 * positive_definite()

    found = mixed(hessian, weighted, share)

    first, second = (x / x.diagonal().mean() for x in (hessian, weighted))
    torch.testing.assert_close(whole(found), (1 - share) * first + share * second)
    assert float(found.diagonal().mean()) == pytest.approx(1)


def test_without_weights_the_hessian_is_only_scaled() -> None:
    hessian = positive_definite()

    found = mixed(hessian, None, 0.5)

    torch.testing.assert_close(whole(found), hessian / hessian.diagonal().mean())


def test_dead_inputs_stay_dead_when_mixed() -> None:
    found = mixed(torch.zeros(K, K), torch.zeros(K, K), 0.5)

    assert torch.equal(whole(found), torch.zeros(K, K))


def test_mean_of_a_hessian_near_the_end_of_fp32_does_not_overflow() -> None:
    found = mixed(3e38 * torch.eye(K), None, 0.0)

    torch.testing.assert_close(whole(found), torch.eye(K))


def test_hessian_that_is_not_finite_reaches_the_factor_as_such() -> None:
    hessian = positive_definite()
    hessian[5, 5] = torch.inf

    found = mixed(hessian, positive_definite(), 0.5)

    assert factor_with(found, damping=DAMPING, name="").remedy == "identity Hessian"
