"""CUDA operations on matrices of several factors side by side, against each factor by itself."""

import pytest
import torch
from roundings import whole_groups

from exl2flow.kernels import PANEL_ROWS, BegunGroups, Group, Scales, get_ops
from exl2flow.model.files.exl2 import QuantParams
from exl2flow.quant.rounding.descent import Metric, refine_together
from exl2flow.quant.rounding.error_feedback import (
    RoundingJob,
    round_matrices,
    round_together,
    rounded_values,
)
from exl2flow.quant.rounding.hessian import MixedHessian, factor, factor_together

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FACTORS = 3


@pytest.fixture(autouse=True)
def precise() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)


def positive(*shape: int) -> torch.Tensor:
    """Return symmetric positive definite matrices fp32 (..., k, k) with strong correlations."""
    k = shape[-1]
    noise = torch.randn(*shape, max(1, k // 4), device=DEVICE)
    return noise @ noise.mT / noise.shape[-1] + 0.3 * torch.eye(k, device=DEVICE)


def side_by_side(own: int, p: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows (p, m), blocks (f, p, p) inside larger ones, scales and half ranges (m,)."""
    m = FACTORS * own
    upper = torch.linalg.cholesky(positive(FACTORS, 2 * p), upper=True)
    half = 2.0 ** torch.randint(1, 8, (m,), device=DEVICE)
    scales = (torch.rand(m, device=DEVICE) + 0.5).mul(1.5 / half).half().float()
    return torch.randn(p, m, device=DEVICE), upper[:, p // 2 :, p // 2 :][:, :p, :p], scales, half


@pytest.mark.parametrize("shape", [(0, 8), (0, 129), (0, 4128), (2, 96), (3, 256)])
@pytest.mark.parametrize("p", [7, 32])
def test_panels_of_several_factors(p: int, shape: tuple[int, int]) -> None:
    blocks, b = shape
    own, ops = max(1, blocks) * b, get_ops(DEVICE)
    rows, upper, scales, half = side_by_side(own, p)
    output = positive(FACTORS * blocks, b) if blocks else None
    hessian = positive(FACTORS, 2 * p)[:, p // 2 : p // 2 + p, p // 2 : p // 2 + p]
    start = torch.where(scales > 0, rows / scales, 0).round().clamp(-half, half - 1)
    gradient = torch.randn_like(rows)

    codes, errors = ops.round_panel(rows.clone(), upper, scales, half, output)
    steps = start.clone()
    change = ops.descend_panel(steps, gradient.clone(), hessian, scales, half, output)

    for f in range(FACTORS):
        c = slice(f * own, (f + 1) * own)
        metric = None if output is None else output[f * blocks : (f + 1) * blocks]
        columns = (scales[c], half[c], metric)
        alone = ops.round_panel(rows[:, c].contiguous(), upper[f], *columns)
        assert torch.equal(codes[:, c], alone[0])
        assert torch.equal(errors[:, c], alone[1])
        mine, slopes = start[:, c].contiguous(), gradient[:, c].contiguous()
        moved = ops.descend_panel(mine, slopes, hessian[f], *columns)
        assert torch.equal(steps[:, c], mine)
        assert torch.equal(change[:, c], moved)


@pytest.mark.parametrize("n", [8, 129, 768])
def test_groups_are_begun_with_the_weights_of_each_factor(n: int) -> None:
    ops, r = get_ops(DEVICE), 64
    x = torch.randn(2 * FACTORS, r, n, device=DEVICE)
    weights = (torch.rand(FACTORS, 2 * r, device=DEVICE) + 0.01)[:, 32 : 32 + r]
    groups = whole_groups(x, (2, 3, 4, 5, 6, 8))
    members = {place: groups[place] for place in (0, 1, 3, 4)}

    def begin(rows: torch.Tensor, members: dict[int, Group], own: torch.Tensor) -> Scales:
        j = rows.shape[1] // n
        codes = torch.zeros(1, j, n, dtype=torch.uint8, device=DEVICE)
        scales = Scales(codes=codes, maxima=codes[:, :, 0].half(), decoded=codes.float())
        ops.begin_groups(rows, members, scales, torch.empty(j * n, device=DEVICE), own)
        return scales

    together = begin(x.transpose(0, 1).reshape(r, -1), members, weights)

    for place, group in members.items():
        alone = begin(x[place].contiguous(), {0: group}, weights[place // 2])
        assert torch.equal(together.codes[:, place], alone.codes[:, 0])
        assert torch.equal(together.maxima[:, place], alone.maxima[:, 0])
        assert torch.equal(together.decoded[:, place], alone.decoded[:, 0])


@pytest.mark.parametrize("blocks", [0, 2])
def test_scales_are_refitted_by_each_hessian(blocks: int) -> None:
    ops, n, r = get_ops(DEVICE), 192, 64
    j = 2 * FACTORS
    output = positive(j * blocks, n // blocks) if blocks else None
    counts = [64, 32, 0, 64, 64, 32]
    groups = [Group(bits=4, start=0, rows=count) if count else None for count in counts]
    hessian, target = positive(FACTORS, r), torch.randn(r, j * n, device=DEVICE)
    codes = torch.randint(0, 16, (r // PANEL_ROWS, j, n), device=DEVICE).to(torch.uint8)
    maxima = (torch.rand(r // PANEL_ROWS, j, device=DEVICE) + 0.5).half()
    decoded = ops.decode_scales(codes[0], maxima[0]).float().expand(r // PANEL_ROWS, -1, -1)
    steps = (target / decoded[0].reshape(-1)).round().clamp(-8, 7)
    gradient = torch.randn(r, j * n, device=DEVICE)

    def refit(first: int, count: int, own: torch.Tensor) -> tuple[Scales, torch.Tensor]:
        places, columns = slice(first, first + count), slice(first * n, (first + count) * n)
        scales = Scales(
            codes=codes[:, places].clone(),
            maxima=maxima[:, places].clone(),
            decoded=decoded[:, places].clone(),
        )
        begun = BegunGroups.of(groups[places], torch.device(DEVICE, 0))
        most = slice(0, begun.longest)
        metric = None if output is None else output[first * blocks : (first + count) * blocks]
        change = ops.refit_scales(
            steps[most, columns].contiguous(),
            gradient[most, columns].contiguous(),
            own[..., most, most],
            begun,
            scales.of(slice(0, begun.longest // PANEL_ROWS)),
            metric,
        )
        return scales, change

    found, change = refit(0, j, hessian)

    for f in range(FACTORS):
        alone, moved = refit(2 * f, 2, hessian[f])
        places = slice(2 * f, 2 * f + 2)
        assert torch.equal(found.maxima[:, places], alone.maxima)
        assert (found.codes[:, places] != alone.codes).float().mean() < 1e-3
        same = change[: len(moved), 2 * f * n : (2 * f + 2) * n]
        assert (same - moved).abs().gt(1e-3).float().mean() < 1e-3


@pytest.mark.parametrize("k", [768, 2048])
def test_experts_are_rounded_as_each_by_itself(k: int) -> None:
    n, params = 256, [QuantParams.uniform(3, 64), QuantParams.uniform(4, 128)]
    blends = [MixedHessian.plain(hessian) for hessian in positive(FACTORS, k)]
    names = [str(f) for f in range(FACTORS)]
    items = factor_together(blends, damping=0.01, names=names)
    jobs = [
        RoundingJob(weight=torch.randn(k, n, device=DEVICE), params=each)
        for _ in items
        for each in params
    ]

    values, _ = rounded_values(jobs, items, search="column")
    together = round_together(jobs, items, search="column")
    metric = Metric(hessian=torch.stack([item.hessian.matrix() for item in items]))
    refined = refine_together(
        list(together), [job.weight for job in jobs], metric, rounds=2, sweeps=1
    )

    for f, blend in enumerate(blends):
        item = factor(blend, damping=0.01, name=names[f])
        assert torch.equal(items[f].perm, item.perm)
        torch.testing.assert_close(items[f].upper, item.upper, rtol=1e-3, atol=1e-5)
        own = slice(f * len(params), (f + 1) * len(params))
        hessian = item.hessian.matrix().double()
        for place, alone in enumerate(round_matrices(jobs[own], item, search="column"), own.start):
            assert torch.equal(values[:, place], together[place].dequantize()[item.perm])
            losses = [
                float(((hessian @ error) * error).sum())
                for matrix in (together[place], alone, refined[place])
                for error in [(matrix.dequantize() - jobs[place].weight)[item.perm].double()]
            ]
            assert losses[0] == pytest.approx(losses[1], rel=0.01)
            assert losses[2] < losses[0]
