"""Rounding whole matrices, against a transcription of the formulas, group by group, row by row."""

import pytest
import torch
from roundings import to_nearest

from exl2flow.core.errors import TensorShapeError
from exl2flow.core.options.config import ScaleSearch
from exl2flow.kernels import get_ops
from exl2flow.model import QuantParams
from exl2flow.quant.measure.candidates import CANDIDATES, HEAD_PARAMS, parse_params
from exl2flow.quant.rounding import error_feedback as gptq
from exl2flow.quant.rounding.error_feedback import RoundedMatrix, RoundingJob, round_matrices
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    HessianSum,
    MixedHessian,
    factor,
    relative_error,
)

PRESETS = sorted(
    {p for rows in CANDIDATES.values() for row in rows for p in row.values()}
    | set(HEAD_PARAMS.values()),
    key=str,
)
GRID = [0.70 * (1 - i / 96) + 1.20 * (i / 96) for i in range(97)]


def correlated_inputs(k: int, *, tokens: int = 512) -> torch.Tensor:
    mixing = torch.eye(k) + torch.randn(k, k) * k**-0.5
    return torch.randn(tokens, k) @ mixing * torch.linspace(0.3, 2, k)


def factor_of(x: torch.Tensor) -> HessianFactor:
    total = HessianSum(x.shape[1])
    total.add(x)
    return factor(MixedHessian.plain(total.mean()), damping=0.12, name="test")


def alone(
    weight: torch.Tensor,
    params: QuantParams,
    item: HessianFactor,
    *,
    search: ScaleSearch = "grid",
    output: torch.Tensor | None = None,
) -> RoundedMatrix:
    job = RoundingJob(weight=weight, params=params, output=output)
    return next(round_matrices([job], item, search=search))


def output_metric(blocks: int, b: int, *, rank: int = 8) -> torch.Tensor:
    """Return strongly correlated blocks of mean diagonal 1.3, as damped output factors have."""
    noise = torch.randn(blocks, b, rank)
    return noise @ noise.mT / rank + 0.3 * torch.eye(b)


def output_loss(
    weight: torch.Tensor, matrix: RoundedMatrix, item: HessianFactor, output: torch.Tensor
) -> float:
    """Return tr(O Eᵀ H E) of the damped Hessian, in fp64."""
    error = (matrix.dequantize().double() - weight.double())[item.perm]
    whole = torch.block_diag(*output).double()
    return float(((item.hessian.matrix().double() @ error @ whole) * error).sum())


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def check_same(found: RoundedMatrix, expected: RoundedMatrix) -> None:
    assert found.groups == expected.groups
    for name in ("codes", "scale_codes", "max_scales", "perm"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def check_scales(
    x: torch.Tensor, bits: int, found: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale codes, decoder scales) of a group x (r, n), by the formulas.

    `found` is the maximum that was stored: it must be the best of the grid, or tie with it.
    """
    highest, zero = 2**bits - 1, 2 ** (bits - 1)
    base = (x.abs().amax(dim=0) + 1e-12) / (highest / 2)
    largest = base.max()
    levels = torch.clamp(torch.round(16 * torch.sqrt(base / largest)), 1, 16)
    t = (levels / 16) ** 2 * largest
    errors = []
    for p in GRID:
        q = torch.clamp(torch.round(x / (t * p)), -zero, highest - zero) * (t * p)
        errors.append(float(((q - x).abs() ** 3.5).sum()))
    chosen = round((float(found / largest) - 0.70) / 0.50 * 96)
    assert errors[chosen] <= min(errors) * (1 + 1e-4)  # fp32 sums in another order
    assert float(found) == pytest.approx(float(largest * GRID[chosen]), rel=2**-10)
    return levels - 1, to_fp16(levels**2 * to_fp16(found.float() / 256))


def check_row(ratio: torch.Tensor, found: torch.Tensor, bits: int) -> int:
    """Compare codes (n,) with those of weight over scale, and return how many tied."""
    zero = 2 ** (bits - 1)
    differ = torch.clamp(torch.round(ratio) + zero, 0, 2**bits - 1) != found
    # GEMMs add in another order: only a value halfway between two codes may fall to either side
    distance = (ratio + zero - found)[differ].abs() - 0.5
    torch.testing.assert_close(distance, torch.zeros(len(distance)), rtol=0, atol=1e-3)
    return int(differ.sum())


def check_group(
    w: torch.Tensor, matrix: RoundedMatrix, index: int, item: HessianFactor, search: ScaleSearch
) -> torch.Tensor:
    """Check the scales of a group found for its rows w (r, n), and return what they decode to."""
    group = matrix.groups[index]
    maximum = matrix.max_scales[index]
    if search == "grid":
        scale_codes, scales = check_scales(w, group.bits, maximum)
    else:  # the loop that this search is compared with is in the kernels' tests
        diagonal = item.upper.diagonal()[group.start : group.start + group.rows]
        found, stored = get_ops("cpu").search_columns(w[None], [group], 1 / diagonal**2)
        assert float(stored[0]) == float(maximum)
        scale_codes = found[0].float()
        scales = to_fp16((scale_codes + 1) ** 2 * to_fp16(maximum.float() / 256))
    assert (matrix.scale_codes[index].float() != scale_codes).sum() <= 1  # a tie
    return scales


@pytest.mark.parametrize(
    ("params", "search"),
    [(p, "grid") for p in PRESETS[::3]] + [(p, "column") for p in PRESETS[1::9]],
    ids=str,
)
def test_rounding_is_the_transcription_of_the_formulas(
    params: QuantParams, search: ScaleSearch
) -> None:
    item = factor_of(correlated_inputs(160))
    weight = torch.randn(160, 32) * 0.1

    found = alone(weight, params, item, search=search)

    w, upper, errors, ties = weight[item.perm], item.upper, torch.zeros(160, 32), 0
    for index, group in enumerate(params.groups(160)):
        a, e, zero = group.start, group.start + group.rows, 2 ** (group.bits - 1)
        s = check_group(w[a:e], found, index, item, search)
        for c in range(a, e):
            codes = found.codes[c].float()
            ties += check_row(torch.where(s > 0, w[c] / s, 0), codes, group.bits)
            errors[c] = (w[c] - to_fp16((codes - zero) * s)) / upper[c, c]
            w[c:e] -= torch.outer(upper[c, c:e], errors[c])
        w[e:] -= upper[a:e, e:].T @ errors[a:e]
    assert ties <= 5  # of 5120 codes


@pytest.mark.parametrize("params", PRESETS[::12], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
def test_regarding_the_outputs_lowers_the_error_in_their_metric(
    blocks: int, params: QuantParams
) -> None:
    item = factor_of(correlated_inputs(160))
    weight, output = torch.randn(160, 96) * 0.1, output_metric(blocks, 96 // blocks)

    found, without = (
        alone(weight, params, item, search="column", output=metric) for metric in (output, None)
    )

    losses = [output_loss(weight, matrix, item, output) for matrix in (found, without)]
    assert losses[0] < 0.8 * losses[1]
    assert found.groups == without.groups


@pytest.mark.parametrize("params", PRESETS[::12], ids=str)
def test_identity_instead_of_an_output_factor_changes_nothing(params: QuantParams) -> None:
    item = factor_of(correlated_inputs(160))
    weight = torch.randn(160, 96) * 0.1
    identity = torch.eye(32).repeat(3, 1, 1)

    found, without = (
        alone(weight, params, item, search="column", output=metric) for metric in (identity, None)
    )

    check_same(found, without)


def test_codes_are_within_their_widths_and_cover_them() -> None:
    params = parse_params("8/4/3@0.05/0.1/0.85 g32/128/128")
    item = factor_of(correlated_inputs(640, tokens=1280))

    found = alone(torch.randn(640, 64), params, item)

    for group in found.groups:
        codes = found.codes[group.start : group.start + group.rows]
        assert int(codes.max()) <= 2**group.bits - 1
        assert len(codes.unique()) > 2 ** (group.bits - 1)


@pytest.mark.parametrize("params", PRESETS[::10], ids=str)
def test_packed_tensors_decode_to_the_rounded_matrix_bit_for_bit(params: QuantParams) -> None:
    found = alone(torch.randn(160, 64) * 0.05, params, factor_of(correlated_inputs(160)))

    packed = found.pack(torch.randn(64))

    assert torch.equal(packed.dequantize(), found.dequantize())
    assert packed.groups == found.groups
    assert torch.equal(packed.inverse_perm.long()[found.perm], torch.arange(160))


def test_rows_are_rounded_in_the_order_of_the_diagonal() -> None:
    item = factor_of(correlated_inputs(96))
    params = parse_params("8/2@0.3/0.7 g32")
    weight = torch.randn(96, 32)

    error = (alone(weight, params, item).dequantize().float() - weight).abs().mean(dim=1)

    first = item.hessian.undamped.diagonal().topk(32).indices
    others = torch.ones(96, dtype=torch.bool)
    others[first] = False
    # eight bits for the strongest in-features, two for the others
    assert 10 * float(error[first].max()) < float(error[others].min())


@pytest.mark.parametrize("search", ["grid", "column"])
@pytest.mark.parametrize("company", [1, pytest.param(3, marks=pytest.mark.slow), 9])
def test_matrix_is_rounded_alike_alone_and_beside_others(
    company: int, search: ScaleSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = factor_of(correlated_inputs(96))
    jobs = [
        RoundingJob(
            weight=torch.randn(96, 32 * blocks),
            params=PRESETS[(8 * blocks + 3 * i) % len(PRESETS)],
            output=output_metric(blocks, 32) if i > 2 else None,
        )
        for blocks in (1, 3)
        for i in range(6)
    ]
    monkeypatch.setattr(gptq, "BATCH_ELEMENTS", company * 96 * 32)

    together = list(round_matrices(jobs, item, search=search))

    assert len(together) == len(jobs)
    for job, found in zip(jobs, together, strict=True):
        check_same(found, alone(job.weight, job.params, item, search=search, output=job.output))


def test_no_jobs_give_no_results() -> None:
    assert list(round_matrices([], factor_of(correlated_inputs(32)), search="grid")) == []


@pytest.mark.parametrize("search", ["grid", "column"])
@pytest.mark.parametrize("params", PRESETS[::10], ids=str)
def test_feedback_beats_rounding_to_nearest_on_the_outputs(
    params: QuantParams, search: ScaleSearch
) -> None:
    x = correlated_inputs(256)
    item = factor_of(x)
    weight = torch.randn(256, 64) * 0.1

    with_feedback, nearest = (
        float((x @ (weight - alone(weight, params, each, search=search).dequantize())).norm())
        for each in (item, to_nearest(item))
    )

    assert with_feedback < 0.9 * nearest


def test_without_feedback_every_weight_takes_its_nearest_code() -> None:
    item = to_nearest(factor_of(correlated_inputs(64)))
    params = parse_params("4 g32")
    weight = torch.randn(64, 32)

    found = alone(weight, params, item)

    matrix = found.dequantize()[found.perm].float()
    for group, stored, codes in zip(found.groups, found.max_scales, found.scale_codes, strict=True):
        rows = slice(group.start, group.start + group.rows)
        scales = to_fp16((codes.float() + 1) ** 2 * to_fp16(stored.float() / 256))
        steps = torch.arange(-8, 8)[:, None, None] * scales
        distances = (weight[found.perm][rows] - to_fp16(steps)).abs().amin(dim=0)
        errors = (weight[found.perm][rows] - matrix[rows]).abs()
        # the code is chosen before its value is rounded to fp16, with steps of 2^-9 below 4
        torch.testing.assert_close(errors, distances, rtol=0, atol=2**-10)


@pytest.mark.parametrize("params", PRESETS[::20], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1e-6])
@pytest.mark.parametrize("search", ["grid", "column"])
def test_tiny_matrices_stay_finite(params: QuantParams, size: float, search: ScaleSearch) -> None:
    item = factor_of(correlated_inputs(96))
    output = output_metric(1, 32) if search == "column" else None

    found = alone(size * torch.randn(96, 32), params, item, search=search, output=output)

    assert found.max_scales.isfinite().all()
    assert found.dequantize().isfinite().all()
    if size < 1e-9:
        assert not found.dequantize().any()


@pytest.mark.parametrize("search", ["grid", "column"])
def test_zero_columns_stay_zero_and_leave_the_others_alone(search: ScaleSearch) -> None:
    item = factor_of(correlated_inputs(96))
    params = parse_params("5/4@0.1/0.9 g32")
    weight = torch.randn(96, 32)
    padded = torch.nn.functional.pad(weight, (0, 32))

    found, plain = (alone(w, params, item, search=search) for w in (padded, weight))

    assert torch.equal(found.dequantize()[:, :32], plain.dequantize())
    assert not found.dequantize()[:, 32:].any()
    for group in found.groups:
        rows = found.codes[group.start : group.start + group.rows, 32:]
        assert rows.unique().tolist() == [2 ** (group.bits - 1)]


def test_identity_instead_of_a_hessian_still_rounds_well() -> None:
    hessian = torch.full((64, 64), torch.nan)
    item = factor(MixedHessian.plain(hessian), damping=0.12, name="test")
    weight = torch.randn(64, 32)

    rounded = alone(weight, parse_params("6 g32"), item).dequantize().float()

    assert item.remedy == "identity Hessian"
    assert (
        relative_error(torch.eye(64), weight, rounded) < 0.03
    )  # a 64th of the range, uniform error


@pytest.mark.parametrize("k", [16, 48, 100])
def test_rows_that_fill_no_word_are_refused(k: int) -> None:
    item = factor(MixedHessian.plain(torch.eye(k)), damping=0.12, name="test")

    with pytest.raises(TensorShapeError, match=f"{k} in-features are not a multiple of 32"):
        alone(torch.randn(k, 32), parse_params("4 g32"), item)
