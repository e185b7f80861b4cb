"""Trained linear maps: values are those of the file, gradients those of the formula."""

import pytest
import torch

from exl2flow.core.errors import NonFiniteState
from exl2flow.model import QuantizedMatrix, QuantParams
from exl2flow.quant.rounding.error_feedback import RoundedMatrix
from exl2flow.quant.training.trainable import Rates, TrainedLinear, fits_half

PARAMS = QuantParams(bit_widths=(4, 3), proportions=(0.4, 0.6), group_sizes=(32, 64))
RATES = Rates(scale=3e-3, norm=2e-3, code=0.1)
K, N, OUT = 160, 32, 27  # groups of 32, 32, 64 and, cut short, 32 rows


@pytest.fixture
def matrix() -> QuantizedMatrix:
    """A matrix of random codes whose last columns are padding."""
    groups = PARAMS.groups(K)
    assert [group.rows for group in groups] == [32, 32, 64, 32]
    codes = torch.cat([torch.randint(2**g.bits, (g.rows, N), dtype=torch.uint8) for g in groups])
    return QuantizedMatrix.encode(
        codes=codes,
        groups=groups,
        scale_codes=torch.randint(16, (len(groups), N), dtype=torch.uint8),
        max_scales=torch.rand(len(groups)).mul_(0.01).half(),
        perm=torch.randperm(K),
        bias=torch.cat([torch.randn(OUT), torch.zeros(N - OUT)]),
    )


@pytest.fixture
def linear(matrix: QuantizedMatrix) -> TrainedLinear:
    """The matrix with everything in it trained."""
    return made(matrix, towards=0.01 * torch.randn(OUT, K))


def made(matrix: QuantizedMatrix, *, towards: torch.Tensor) -> TrainedLinear:
    """Return a matrix with everything in it trained; towards: a source's weight."""
    rounded = RoundedMatrix.of(matrix, torch.device("cpu"))
    return TrainedLinear(rounded, RATES, out_features=OUT, bias=matrix.bias, towards=towards)


def test_untouched_matrix_is_exported_as_it_was(
    matrix: QuantizedMatrix, linear: TrainedLinear
) -> None:
    found = linear.export().to_tensors("x")

    for name, tensor in matrix.to_tensors("x").items():
        assert torch.equal(found[name], tensor)


def test_exported_matrix_decodes_to_the_one_in_use(linear: TrainedLinear) -> None:
    assert linear.codes_moved is not None
    assert linear.start_bias is not None
    before = linear.decode()[0]
    with torch.no_grad():
        linear.factors.normal_(std=0.1)
        linear.codes_moved.normal_(std=3)  # many leave the range of their codes
        linear.start_bias.mul_(1.1)

    made = linear.export()

    matrix, _ = linear.decode()
    assert not torch.equal(matrix, before)
    assert torch.equal(made.dequantize(torch.float32)[:, :OUT], matrix)
    assert made.bias is not None
    assert torch.equal(made.bias[:OUT].float(), linear.bias)
    x = torch.randn(2, 3, K)
    torch.testing.assert_close(linear(x), x @ matrix + made.bias[:OUT].float())


def test_codes_begin_half_way_to_the_sources_weight_within_their_cells(
    matrix: QuantizedMatrix, linear: TrainedLinear
) -> None:
    exact, steps = linear.decode()
    near = (exact + 0.2 * steps).T  # a fifth of a step beside each code
    far = (exact - 3 * steps).T

    begun = [made(matrix, towards=weight) for weight in (near, far)]

    assert linear.codes_moved is not None
    assert 0 < float(linear.codes_moved.detach().abs().max()) < 0.25
    for moved, expected in zip((each.codes_moved for each in begun), (0.1, -0.245), strict=True):
        assert moved is not None
        # decoded values are rounded to fp16, by up to a tenth of a step here
        torch.testing.assert_close(moved, torch.full_like(moved, expected), atol=0.05, rtol=0)
    assert all(torch.equal(each.decode()[0], exact) for each in begun)


def test_codes_stay_where_they_can_turn_back_at_once(linear: TrainedLinear) -> None:
    assert linear.codes_moved is not None
    with torch.no_grad():
        linear.codes_moved.fill_(100.0)
    linear.bound()

    top = linear.signed_codes()

    assert torch.equal(top, (linear.half - 1).expand_as(top))
    with torch.no_grad():
        linear.codes_moved.sub_(0.99)
    assert torch.equal(linear.signed_codes(), top - 1)


def test_gradients_are_those_of_the_unrounded_formula(linear: TrainedLinear) -> None:
    x = torch.randn(1, 5, K, requires_grad=True)
    grad = torch.randn(1, 5, OUT)
    factors = torch.zeros(len(linear.factors), requires_grad=True)
    moved = torch.zeros(K, OUT, requires_grad=True)
    exact, steps = linear.decode()
    assert linear.codes_moved is not None

    found = torch.autograd.grad(linear(x), [x, linear.factors, linear.codes_moved], grad)

    scaled = factors.exp()[linear.group][:, None] * (exact + moved * steps)
    expected = torch.autograd.grad(x @ scaled, [x, factors, moved], grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_weight_too_large_for_fp16_is_refused() -> None:
    with pytest.raises(NonFiniteState, match=r"`model\.norm\.weight` does not fit fp16"):
        fits_half(torch.tensor([1.0, 70_000.0]), "model.norm.weight")
