"""Matrices that wait in main memory: the same work, by windows of rows."""

import pytest
import torch

from exl2flow.kernels import PANEL_ROWS
from exl2flow.model import DenseLinear, QuantParams
from exl2flow.quant.measure.candidates import parse_params
from exl2flow.quant.refine.improvement import loss
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    padded_weight,
    round_matrices,
)
from exl2flow.quant.rounding.hessian import HessianFactor, MixedHessian, factor
from exl2flow.quant.walk import pinned as tall
from exl2flow.quant.walk.pinned import BYTES, TALL_WINDOW_ROWS, Tall, is_tall, made_to_fit

K, N = TALL_WINDOW_ROWS + 3 * PANEL_ROWS, 64
PARAMS = ("3 g32", "4/2@0.31/0.69 g128")  # groups of the second reach over the first window's end


@pytest.fixture
def is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every matrix be too large."""
    monkeypatch.setattr(tall, "is_tall", lambda elements, limit: True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def item(device: torch.device) -> HessianFactor:
    noise = torch.randn(K, K // 2, device=device)
    hessian = noise @ noise.T / K + 0.1 * torch.eye(K, device=device)
    return factor(MixedHessian.plain(hessian), damping=0.05, name="test")


@pytest.fixture
def linear(device: torch.device) -> DenseLinear:
    return DenseLinear(torch.randn(N - 5, K, device=device) * 0.1)


def rounded(linear: DenseLinear, item: HessianFactor, params: QuantParams) -> RoundedMatrix:
    job = RoundingJob(weight=padded_weight(linear), params=params)
    return next(round_matrices([job], item, search="column", keep_fed_back=True))


def same_share(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found == expected).float().mean())


def test_tall_matrices_follow_from_size_and_limit() -> None:
    assert not is_tall(10**9, BYTES * 10**9)
    assert is_tall(10**9 + 1, BYTES * 10**9)


def test_a_head_is_made_to_fit_when_memory_runs_out() -> None:
    tried = []

    def work() -> str:
        tried.append(Tall.empty(K, N, torch.device("cpu")).is_resident)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return "done"

    assert made_to_fit(work) == "done"
    assert tried == [True, False]
    assert Tall.empty(K, N, torch.device("cpu")).is_resident


def test_a_head_that_does_not_fit_at_all_says_so() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        made_to_fit(work)


def test_a_tall_matrix_is_read_and_written_by_windows(is_forced: None) -> None:
    matrix = Tall.empty(K, N, torch.device("cpu"))
    matrix.values.fill_(1.0)
    rows = matrix.read(32, 64)
    rows += 1
    assert matrix.values[32:64].eq(1).all()
    matrix.write(32, rows)
    assert matrix.values[32:64].eq(2).all()

    spans = []
    for span, part in matrix.parts(64):
        spans.append((span.start, span.stop))
        part.fill_(3.0)
    assert spans == [(64, 64 + TALL_WINDOW_ROWS), (64 + TALL_WINDOW_ROWS, K)]
    assert matrix.values[64:].eq(3).all()
    assert matrix.values[:32].eq(1).all()
    assert list(matrix.windows()) == [(0, TALL_WINDOW_ROWS), (TALL_WINDOW_ROWS, K)]


def test_a_resident_matrix_is_changed_in_place() -> None:
    matrix = Tall.empty(K, N, torch.device("cpu"))
    assert matrix.is_resident
    for span, part in matrix.parts():
        assert span == slice(0, K)
        part.zero_()
    matrix.read(0, 32).add_(1)
    assert matrix.values.sum() == 32 * N


@pytest.mark.parametrize("cell", PARAMS)
def test_rounding_by_windows_gives_the_same_matrix(
    cell: str, item: HessianFactor, linear: DenseLinear, request: pytest.FixtureRequest
) -> None:
    params = parse_params(cell)
    expected = rounded(linear, item, params)
    request.getfixturevalue("is_forced")
    found = rounded(linear, item, params)

    # sums in another order move a few values over the edge between two codes
    assert same_share(found.codes, expected.codes) > 0.98
    assert same_share(found.scale_codes, expected.scale_codes) > 0.98
    metric, weight = Metric(hessian=item.hessian.matrix()), padded_weight(linear)
    assert loss(found, weight, metric) == pytest.approx(loss(expected, weight, metric), rel=2e-3)
    assert found.fed_back is not None
    assert expected.fed_back is not None
    norms = [
        sum(p.square().sum() for _, p in m.parts()) for m in (found.fed_back, expected.fed_back)
    ]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=2e-3)


@pytest.mark.parametrize("cell", PARAMS)
@pytest.mark.parametrize("in_metric", [False, True])
def test_refining_by_windows_gives_as_good_a_matrix(
    cell: str,
    in_metric: bool,
    item: HessianFactor,
    linear: DenseLinear,
    request: pytest.FixtureRequest,
) -> None:
    start, weight = rounded(linear, item, parse_params(cell)), padded_weight(linear)
    noise = torch.randn(N // 32, 32, 8, device=linear.weight.device)
    blocks = noise @ noise.mT / 8 + 0.1 * torch.eye(32, device=noise.device)
    metric = Metric(hessian=item.hessian.matrix(), output=blocks if in_metric else None)
    expected = refine(start, weight, metric, rounds=2, sweeps=1)
    request.getfixturevalue("is_forced")
    found = refine(start, weight, metric, rounds=2, sweeps=1)

    before, after = loss(start, weight, metric), loss(found, weight, metric)
    assert after < before
    assert after == pytest.approx(loss(expected, weight, metric), rel=5e-3)
    assert same_share(found.codes, expected.codes) > 0.97
