"""One stored matrix: its layout in words, and what refining may and may not change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roundings import to_nearest

from exl2flow.core.options.config import RoundingOptions
from exl2flow.kernels import Group
from exl2flow.model import QuantizedMatrix, QuantParams
from exl2flow.quant.measure.candidates import HEAD_OPTIONS, PROJECTION_OPTIONS
from exl2flow.quant.refine.improvement import ANEW, STORED, improve, loss, params_of
from exl2flow.quant.rounding.descent import Metric
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.rounding.hessian import HessianFactor, MixedHessian, factor

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "golden" / "exl2.json").read_text()
)["tensor"]
OPTIONS = RoundingOptions()
ROWS, COLUMNS = 96, 64


def words(lines: list[str]) -> torch.Tensor:
    """Return lines of hexadecimal 32-bit words as int32."""
    values = torch.tensor([[int(word, 16) for word in line.split()] for line in lines])
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


def golden() -> QuantizedMatrix:
    """Return the matrix (96, 32) of three bit widths that was made without our code."""
    return QuantizedMatrix(
        packed=words(GOLDEN["packed"]),
        scale_codes=words(GOLDEN["scale_codes"]),
        max_scales=torch.tensor(GOLDEN["max_scales"], dtype=torch.int16).view(torch.float16),
        group_table=torch.tensor(GOLDEN["group_table"], dtype=torch.int16),
        inverse_perm=torch.tensor(GOLDEN["inverse_perm"], dtype=torch.int32),
    )


def problem(n: int = COLUMNS) -> tuple[torch.Tensor, HessianFactor]:
    """Return a weight fp32 (k, n) and the factor of a Hessian of dependent inputs."""
    x = torch.randn(256, ROWS) @ torch.randn(ROWS, ROWS) * ROWS**-0.5
    return torch.randn(ROWS, n) * 0.1, factor(
        MixedHessian.plain(x.T @ x / 256), damping=0.05, name="test"
    )


def roughly(weight: torch.Tensor, item: HessianFactor, params: QuantParams) -> RoundedMatrix:
    """Round to nearest in an order that no Hessian gives."""
    other_order = replace(item.hessian, perm=torch.randperm(ROWS))
    shuffled = to_nearest(replace(item, hessian=other_order))
    job = RoundingJob(weight=weight, params=params)
    return next(round_matrices([job], shuffled, search="grid"))


def metric_of(rounded: RoundedMatrix, item: HessianFactor) -> Metric:
    return Metric(hessian=replace(item.hessian, perm=rounded.perm).matrix())


@pytest.mark.parametrize("k", [64, 96, 384, 1024, 11008])
def test_parameters_are_found_for_every_layout_that_we_write(k: int) -> None:
    layouts = [params.groups(k) for params in (*PROJECTION_OPTIONS, *HEAD_OPTIONS)]

    found = [params_of(groups) for groups in layouts]

    assert [params and params.groups(k) for params in found] == layouts


@pytest.mark.parametrize(
    "sizes", [((2, 32), (4, 32), (3, 32)), ((4, 32), (4, 64)), ((4, 32), (3, 32), (4, 32))]
)
def test_groups_that_no_parameters_describe_have_none(sizes: tuple[tuple[int, int], ...]) -> None:
    starts = [sum(rows for _, rows in sizes[:i]) for i in range(len(sizes))]
    groups = tuple(
        Group(bits=bits, start=start, rows=rows)
        for (bits, rows), start in zip(sizes, starts, strict=True)
    )

    assert params_of(groups) is None


def test_foreign_matrix_is_unpacked_and_packed_to_the_same_bytes() -> None:
    matrix = golden()

    rounded = RoundedMatrix.of(matrix, torch.device("cpu"))

    assert torch.equal(rounded.dequantize(), matrix.dequantize())
    packed = rounded.pack(None).to_tensors("x")
    for name, tensor in matrix.to_tensors("x").items():
        torch.testing.assert_close(packed[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("params", [PROJECTION_OPTIONS[0], PROJECTION_OPTIONS[-1]], ids=str)
def test_refined_matrix_keeps_its_layout_and_has_less_loss(params: QuantParams) -> None:
    weight, item = problem()
    stored = roughly(weight, item, params)

    made = improve(stored, weight, item, None, OPTIONS)

    assert made.matrix.groups == stored.groups
    assert torch.equal(made.matrix.perm, stored.perm)
    assert made.before == pytest.approx(loss(stored, weight, metric_of(stored, item)))
    found = loss(made.matrix, weight, metric_of(stored, item))
    assert found == pytest.approx(min(made.losses.values()))
    assert found < 0.8 * made.before


def test_foreign_matrix_with_its_own_layout_is_refined() -> None:
    stored = RoundedMatrix.of(golden(), torch.device("cpu"))
    weight, item = problem(32)
    weight = stored.dequantize().float() + 0.3 * weight

    made = improve(stored, weight, item, None, OPTIONS)

    assert made.matrix.groups == stored.groups
    assert min(made.losses.values()) < made.before


def test_layout_without_parameters_is_refined_from_the_stored_codes() -> None:
    weight, item = problem()
    params = QuantParams(bit_widths=(4,), proportions=(1.0,), group_sizes=(32,))
    regular = roughly(weight, item, params)
    groups = tuple(Group(bits=bits, start=32 * i, rows=32) for i, bits in enumerate((4, 5, 4)))
    stored = replace(regular, groups=groups)

    made = improve(stored, weight, item, None, OPTIONS)

    assert list(made.losses) == [STORED]
    assert made.start == STORED
    assert made.losses[STORED] < made.before


def test_far_stored_codes_are_not_refined_and_near_ones_win_where_they_are_better() -> None:
    weight, item = problem()
    stored = roughly(weight, item, PROJECTION_OPTIONS[0])

    first = improve(stored, weight, item, None, OPTIONS)
    exact = improve(first.matrix, first.matrix.dequantize().float(), item, None, OPTIONS)

    assert list(first.losses) == [ANEW]
    assert exact.start == STORED
    assert exact.losses[STORED] == exact.before == 0
    assert torch.equal(exact.matrix.codes, first.matrix.codes)


def test_errors_are_weighted_by_the_output_metric() -> None:
    weight, item = problem()
    stored = roughly(weight, item, PROJECTION_OPTIONS[0])
    g = torch.randn(40, COLUMNS) * torch.logspace(-1, 1, COLUMNS)
    output = (g.T @ g / 40 + 0.3 * torch.eye(COLUMNS))[None]

    made = improve(stored, weight, item, output, OPTIONS)
    plain = improve(stored, weight, item, None, OPTIONS)

    metric = replace(metric_of(stored, item), output=output)
    assert loss(made.matrix, weight, metric) < loss(plain.matrix, weight, metric)
