"""Coordinate descent and refinement never make a matrix worse, whatever it is."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2flow.kernels import Group
from exl2flow.kernels.reference.ops import TORCH_OPS
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import RoundedMatrix

BITS = (8, 6, 5, 4, 3, 2)
ROUNDING = 1e-5  # of fp32 sums, relative to the loss at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A coded matrix with the weight it stands for; everything is drawn."""

    matrix: RoundedMatrix
    weight: torch.Tensor
    metric: Metric


def metric_factor(generator: torch.Generator, *shape: int, rank: int) -> torch.Tensor:
    """Return positive definite fp32 (..., k, k), of strong correlations if the rank is low."""
    noise = torch.randn(*shape, rank, generator=generator)
    return noise @ noise.mT / rank + 0.05 * torch.eye(shape[-1])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw groups, blocks, columns without scale, and codes that need not be near the weight."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    widths = sorted(draw(st.lists(st.sampled_from(BITS), min_size=1, max_size=3)), reverse=True)
    groups: list[Group] = []
    for bits in widths:
        start = groups[-1].start + groups[-1].rows if groups else 0
        groups.append(Group(bits=bits, start=start, rows=draw(st.sampled_from((32, 64)))))
    k, n = groups[-1].start + groups[-1].rows, 32 * draw(st.integers(1, 3))
    size = draw(st.sampled_from((1.0, 1e-3, 1e-6)))  # scales of the last two are subnormal
    blocks = draw(st.sampled_from((0, 1, n // 32)))
    rank = draw(st.sampled_from((2, 32)))
    is_near = draw(st.booleans())

    weight = size * torch.randn(k, n, generator=generator)
    weight[:, :: draw(st.sampled_from((7, 1000)))] = 0  # padding; the first column at least
    scale_codes = torch.randint(16, (len(groups), n), generator=generator).to(torch.uint8)
    codes = torch.empty(k, n, dtype=torch.uint8)
    maxima = torch.empty(len(groups), dtype=torch.float16)
    perm = torch.randperm(k, generator=generator)
    for index, group in enumerate(groups):
        rows, half = slice(group.start, group.start + group.rows), 2 ** (group.bits - 1)
        maxima[index] = draw(st.sampled_from((0.0, 0.5, 3.0))) * size / half
        scales = TORCH_OPS.decode_scales(scale_codes[[index]], maxima[[index]]).float()
        steps = (weight[perm][rows] / scales.clamp(min=1e-8)).round()
        anywhere = torch.randint(2 * half, (group.rows, n), generator=generator).float()
        codes[rows] = (steps + half if is_near else anywhere).clamp(0, 2 * half - 1).to(torch.uint8)
    output = None if blocks == 0 else metric_factor(generator, blocks, n // blocks, rank=rank)
    return Problem(
        matrix=RoundedMatrix(
            codes=codes, groups=tuple(groups), scale_codes=scale_codes, max_scales=maxima, perm=perm
        ),
        weight=weight,
        metric=Metric(hessian=metric_factor(generator, k, rank=rank), output=output),
    )


def loss(matrix: RoundedMatrix, problem: Problem) -> float:
    """Return tr(O Eᵀ H E) in fp64 of what scales and codes stand for, before fp16 rounds it."""
    scales = TORCH_OPS.decode_scales(matrix.scale_codes, matrix.max_scales).double()
    error = -problem.weight[matrix.perm].double()
    for index, group in enumerate(matrix.groups):
        rows = slice(group.start, group.start + group.rows)
        error[rows] += (matrix.codes[rows].double() - 2 ** (group.bits - 1)) * scales[index]
    output = problem.metric.output
    whole = torch.eye(error.shape[1]) if output is None else torch.block_diag(*output)
    return float(((problem.metric.hessian.double() @ error @ whole.double()) * error).sum())


def check_falling(course: list[float]) -> None:
    for earlier, later in pairwise(course):
        assert later <= earlier + ROUNDING * course[0]


@settings(max_examples=30)
@given(problem=problems(), rounds=st.integers(0, 1))
def test_neither_refit_nor_descent_raises_the_loss(problem: Problem, rounds: int) -> None:
    begun = refine(problem.matrix, problem.weight, problem.metric, rounds=rounds, sweeps=1)

    refined = [
        refine(begun, problem.weight, problem.metric, rounds=1, sweeps=sweeps)
        for sweeps in (0, 1, 2)  # the refit alone, then with descent
    ]

    check_falling([loss(matrix, problem) for matrix in (begun, *refined)])


@settings(max_examples=15)
@given(problem=problems())
def test_refined_matrix_has_the_same_layout_and_codes_within_it(problem: Problem) -> None:
    matrix = refine(problem.matrix, problem.weight, problem.metric, rounds=1, sweeps=1)

    assert matrix.groups == problem.matrix.groups
    assert torch.equal(matrix.perm, problem.matrix.perm)
    for group in matrix.groups:
        assert int(matrix.codes[group.start : group.start + group.rows].max()) < 2**group.bits
    assert int(matrix.scale_codes.max()) < 16
    assert matrix.max_scales.isfinite().all()
    assert (matrix.max_scales >= 0).all()


@given(problem=problems())
def test_descent_of_a_panel_never_raises_the_loss(problem: Problem) -> None:
    group = problem.matrix.groups[0]
    rows, half = slice(0, group.rows), 2.0 ** (group.bits - 1)
    scales = TORCH_OPS.decode_scales(problem.matrix.scale_codes[:1], problem.matrix.max_scales[:1])[
        0
    ].float()
    hessian, output = problem.metric.hessian[rows, rows].contiguous(), problem.metric.output
    whole = torch.eye(len(scales)) if output is None else torch.block_diag(*output)
    weight = problem.weight[problem.matrix.perm][rows]
    steps = problem.matrix.codes[rows].float() - half
    ranges = torch.full_like(scales, half)

    course = []
    for _ in range(3):
        error = (steps * scales - weight).double()
        course.append(float(((hessian.double() @ error @ whole.double()) * error).sum()))
        gradient = (hessian @ error.float()) @ whole
        TORCH_OPS.descend_panel(steps, gradient, hessian, scales, ranges, output)
        assert torch.equal(steps, steps.round().clamp(-half, half - 1))

    check_falling(course)
