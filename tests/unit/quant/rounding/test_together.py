"""Matrices of several Hessians side by side: each as it is by itself."""

import pytest
import torch
from roundings import whole_groups

from exl2flow.kernels import PANEL_ROWS, Scales
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.rounding.descent import Metric, refine_together
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    RoundingJob,
    round_matrices,
    round_together,
    rounded_values,
)
from exl2flow.quant.rounding.hessian import (
    IDENTITY,
    HessianFactor,
    MixedHessian,
    factor,
    factor_together,
    invert_lower,
)
from exl2flow.quant.walk import pinned

K, N, FACTORS = 320, 64, 3
PARAMS = (
    QuantParams.uniform(3, 64),
    QuantParams(bit_widths=(5, 4), proportions=(0.3, 0.7), group_sizes=(32, 128)),
)


def hessian(seed: int, k: int = K) -> torch.Tensor:
    """Return that of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * k, k, generator=generator)
    x = x @ torch.randn(k, k, generator=generator) * (0.1 + torch.rand(k, generator=generator))
    return x.T @ x / len(x)


@pytest.fixture(scope="module")
def items() -> list[HessianFactor]:
    return [
        factor(MixedHessian.plain(hessian(seed)), damping=0.05, name="") for seed in range(FACTORS)
    ]


def jobs_of(seed: int, *, output: bool) -> list[RoundingJob]:
    generator = torch.Generator().manual_seed(10 + seed)
    weights = [torch.randn(K, N, generator=generator) for _ in PARAMS]
    noise = torch.randn(2, 32, 40, generator=generator)
    blocks = noise @ noise.mT / 40 if output else None
    return [
        RoundingJob(weight=weight, params=params, output=blocks)
        for weight, params in zip(weights, PARAMS, strict=True)
    ]


def loss(matrix: RoundedMatrix, job: RoundingJob, item: HessianFactor) -> float:
    error = (matrix.dequantize().float() - job.weight)[matrix.perm].double()
    pushed = error if job.output is None else error @ torch.block_diag(*job.output).double()
    return float(((item.hessian.matrix().double() @ error) * pushed).sum())


@pytest.mark.parametrize("output", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("search", ["grid", "column"])
def test_each_matrix_is_rounded_by_its_own_factor(
    search: str, output: bool, items: list[HessianFactor]
) -> None:
    jobs = [jobs_of(seed, output=output) for seed in range(FACTORS)]
    alone = [
        matrix
        for own, item in zip(jobs, items, strict=True)
        for matrix in round_matrices(own, item, search=search)  # type: ignore[arg-type]
    ]

    flat = [job for own in jobs for job in own]
    together = round_together(flat, items, search=search)  # type: ignore[arg-type]

    for job, mine, other, item in zip(
        flat, together, alone, [i for i in items for _ in PARAMS], strict=True
    ):
        assert torch.equal(mine.perm, other.perm)
        assert mine.groups == other.groups
        # products of another shape are summed in another order: a code may fall to the other side
        assert (mine.codes != other.codes).float().mean() < 0.02
        assert loss(mine, job, item) == pytest.approx(loss(other, job, item), rel=0.01)


def test_values_are_what_codes_decode_to(items: list[HessianFactor]) -> None:
    jobs = [job for seed in range(FACTORS) for job in jobs_of(seed, output=False)]
    jobs = [job for job in jobs for _ in range(2)]  # the same matrix twice

    values, fed_back = rounded_values(jobs, items, search="column")

    matrices = round_together(jobs, items, search="column")
    assert values.shape == fed_back.shape == (K, len(jobs), N)
    for place, matrix in enumerate(matrices):
        assert torch.equal(values[:, place], matrix.dequantize()[matrix.perm])
        item = items[place // (2 * len(PARAMS))]
        error = jobs[place].weight[matrix.perm] - values[:, place].float()
        torch.testing.assert_close(item.upper.T @ fed_back[:, place], error, rtol=1e-3, atol=1e-3)


def test_matrices_in_main_memory_are_rounded_alike(
    items: list[HessianFactor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "is_tall", lambda elements, limit: True)
    monkeypatch.setattr(pinned, "TALL_WINDOW_ROWS", 2 * PANEL_ROWS)
    jobs = [jobs_of(seed, output=False) for seed in range(FACTORS)]

    values, _ = rounded_values([job for own in jobs for job in own], items, search="column")

    alone = [
        matrix.dequantize()[matrix.perm]
        for own, item in zip(jobs, items, strict=True)
        for matrix in round_matrices(own, item, search="column")
    ]
    assert (values != torch.stack(alone, dim=1)).float().mean() < 0.02


@pytest.mark.parametrize("output", [False, True], ids=["plain", "metric"])
def test_each_matrix_is_refined_in_its_own_metric(output: bool, items: list[HessianFactor]) -> None:
    jobs = [jobs_of(seed, output=output) for seed in range(FACTORS)]
    flat = [job for own in jobs for job in own]
    rounded = round_together(flat, items, search="column")
    dampened = [item.hessian.matrix() for item in items]

    def refined(first: int, factors: int) -> list[RoundedMatrix]:
        own = slice(first * len(PARAMS), (first + factors) * len(PARAMS))
        blocks = [job.output for job in flat[own] if job.output is not None]
        matrices = dampened[first : first + factors]
        metric = Metric(
            hessian=torch.stack(matrices) if factors > 1 else matrices[0],
            output=torch.cat(blocks) if blocks else None,
        )
        weights = [job.weight for job in flat[own]]
        return refine_together(rounded[own], weights, metric, rounds=2, sweeps=1)

    alone = [matrix for place in range(FACTORS) for matrix in refined(place, 1)]
    together = refined(0, FACTORS)

    for place, (mine, other) in enumerate(zip(together, alone, strict=True)):
        item, job = items[place // len(PARAMS)], flat[place]
        assert (mine.codes != other.codes).float().mean() < 0.02
        assert loss(mine, job, item) == pytest.approx(loss(other, job, item), rel=0.01)
        assert loss(mine, job, item) < loss(rounded[place], job, item)


def test_factors_and_their_remedies_are_those_of_each() -> None:
    spoiled = torch.full((K, K), torch.nan)
    weak = torch.eye(K)
    weak[0, 1] = weak[1, 0] = 1.02  # one eigenvalue is -0.02
    blends = [MixedHessian.plain(h) for h in (hessian(0), spoiled, hessian(1), weak)]
    names = ["a", "b", "c", "d"]

    found = factor_together(blends, damping=0.01, names=names)

    for blend, name, item in zip(blends, names, found, strict=True):
        alone = factor(blend, damping=0.01, name=name)
        assert item.remedy == alone.remedy
        assert item.hessian.added == alone.hessian.added
        assert torch.equal(item.perm, alone.perm)
        torch.testing.assert_close(item.upper, alone.upper, rtol=1e-3, atol=1e-4)
    assert found[1].remedy == IDENTITY
    assert found[3].remedy == "damping x3"
    assert found[0].remedy == found[2].remedy == ""


@pytest.mark.parametrize("k", [96, 512, 1120])
def test_triangles_are_inverted_side_by_side(k: int) -> None:
    lower = torch.linalg.cholesky(torch.stack([hessian(s, k) + torch.eye(k) for s in range(2)]))
    inverse = lower.clone()

    invert_lower(inverse)

    error = (inverse.double() @ lower.double() - torch.eye(k)).abs().max()
    assert error < 1e-3
    assert not inverse.triu(1).any()


def test_the_twin_searches_with_row_weights_of_each_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, 40, generator=generator)
    weights = torch.rand(2, 64, generator=generator) + 0.01
    groups = dict(enumerate(whole_groups(x, (2, 3, 4, 5))))

    def begin(rows: torch.Tensor, members: dict, own: torch.Tensor) -> Scales:  # type: ignore[type-arg]
        j = rows.shape[1] // 40
        codes = torch.zeros(1, j, 40, dtype=torch.uint8)
        scales = Scales(codes=codes, maxima=codes[:, :, 0].half(), decoded=codes.float())
        TORCH_OPS.begin_groups(rows, members, scales, torch.empty(j * 40), own)
        return scales

    together = begin(x.transpose(0, 1).reshape(64, -1), groups, weights)

    for place in range(4):
        alone = begin(x[place], {0: groups[place]}, weights[place // 2])
        assert torch.equal(together.decoded[:, place], alone.decoded[:, 0])
