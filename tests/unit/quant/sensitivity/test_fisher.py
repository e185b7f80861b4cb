"""Factors as objects: products with the output factor, estimates, sums, and their storage."""

from pathlib import Path

import pytest
import torch
from bounds import SIGMAS
from bounds import error as error_of

from exl2flow.model import ProjectionSpec
from exl2flow.quant.sensitivity.fisher import (
    Factors,
    FactorSum,
    OutputFactor,
    StoredFactors,
    block_size,
    estimate,
    factor_bytes,
    pack_symmetric,
    storing_factors,
    unpack_symmetric,
    unpacked,
)

K, N, BLOCK = 64, 96, 32


def positive(*shape: int, seed: int) -> torch.Tensor:
    noise = torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed))
    return noise @ noise.mT


@pytest.fixture
def factors() -> Factors:
    blocks = positive(N // BLOCK, BLOCK, seed=1)
    return Factors(input=positive(K, seed=2), output=OutputFactor(blocks=blocks, columns=N))


def dense(output: OutputFactor) -> torch.Tensor:
    return torch.block_diag(*output.blocks)


def projection(name: str, capture: str = "input", *, n: int = N, k: int = K) -> ProjectionSpec:
    return ProjectionSpec(
        name=name,
        key=name,
        role="q",
        in_features=k,
        out_features=n,
        has_bias=False,
        capture=capture,
    )


@pytest.mark.parametrize("shape", [(N,), (5, N), (2, 3, N)])
def test_product_with_the_output_factor_is_that_of_the_whole_matrix(
    factors: Factors, shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(factors.output.apply(x), x @ dense(factors.output))


def test_trace_and_diagonal_are_those_of_the_whole_matrix(factors: Factors) -> None:
    whole = dense(factors.output)

    torch.testing.assert_close(factors.output.diagonal(), whole.diagonal())
    assert factors.output.trace == pytest.approx(float(whole.trace()))


def test_damping_is_in_units_of_the_mean_diagonal(factors: Factors) -> None:
    whole = dense(factors.output)

    damped = factors.output.damped(0.3)

    torch.testing.assert_close(dense(damped), whole / whole.diagonal().mean() + 0.3 * torch.eye(N))
    assert float(damped.diagonal().mean()) == pytest.approx(1.3)


def test_zero_factor_can_be_damped() -> None:
    zero = OutputFactor(blocks=torch.zeros(3, BLOCK, BLOCK), columns=N)

    assert torch.equal(dense(zero.damped(0.5)), 0.5 * torch.eye(N))


def test_estimate_is_half_the_quadratic_form(factors: Factors) -> None:
    error = torch.randn(K, N, generator=torch.Generator().manual_seed(3))

    found = estimate(error, factors)

    flat = error.double().flatten()
    form = torch.kron(factors.input.double(), dense(factors.output).double())
    assert found == pytest.approx(0.5 * float(flat @ form @ flat), rel=SIGMAS * error_of(K, N))


@pytest.mark.parametrize(
    ("columns", "limit", "size"),
    [(96, 0, 96), (96, 96, 96), (96, 95, 32), (320, 70, 64), (11008, 512, 256), (64, 8, 32)],
)
def test_blocks_are_the_largest_equal_ones(columns: int, limit: int, size: int) -> None:
    assert block_size(columns, limit) == size


def test_sums_do_not_depend_on_how_tokens_are_divided() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(12, K, generator=generator), torch.randn(12, 90, generator=generator)
    whole, parts = (FactorSum(K, 90, block=BLOCK, device=torch.device("cpu")) for _ in range(2))

    whole.add(x, g)
    for begin in (0, 5):
        parts.add(x[begin : begin + 5 + begin], g[begin : begin + 5 + begin])

    # twelve terms of about 100, of which some nearly cancel, in fp32
    torch.testing.assert_close(parts.input, whole.input, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(parts.blocks, whole.blocks, rtol=1e-5, atol=1e-4)
    assert not whole.output(12).diagonal()[90:].any()  # columns that only the format has


def test_projections_that_read_the_same_share_the_mean_of_their_inputs(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = {name: FactorSum(K, N, block=0, device=torch.device("cpu")) for name in "abc"}
    for total in sums.values():
        total.add(torch.randn(20, K, generator=generator), torch.randn(20, N, generator=generator))
    own = {name: total.factors(20) for name, total in sums.items()}
    specs = (projection("a"), projection("b"), projection("c", "inner"))

    storing_factors(tmp_path / "f.safetensors", specs, sums, 20)()
    found = unpacked(StoredFactors.read(tmp_path / "f.safetensors"), "cpu")

    shared = (own["a"].input + own["b"].input) / 2
    for name, expected in (("a", shared), ("b", shared), ("c", own["c"].input)):
        torch.testing.assert_close(found[name].input, expected)
        torch.testing.assert_close(found[name].output.blocks, own[name].output.blocks)
        assert found[name].output.columns == N
    assert own["a"].output.trace * float(own["a"].input.trace()) == pytest.approx(
        float(sums["a"].input.trace()) / 20
    )


@pytest.mark.parametrize("shape", [(2,), (64,), (3, 32)])
def test_half_of_a_symmetric_matrix_is_enough(shape: tuple[int, ...]) -> None:
    matrix = positive(*shape, seed=0)
    matrix = matrix.triu() + matrix.triu(1).mT  # exactly symmetric

    packed = pack_symmetric(matrix)

    assert packed.shape[-2:] == (shape[-1] // 2, shape[-1] + 1)
    assert torch.equal(unpack_symmetric(packed), matrix)


def test_size_on_disk_is_foreseen(tmp_path: Path) -> None:
    specs = (projection("a", n=128), projection("b"), projection("c", "inner", k=160))
    sums = {
        p.name: FactorSum(p.in_features, p.out_features, block=64, device=torch.device("cpu"))
        for p in specs
    }

    storing_factors(tmp_path / "f.safetensors", specs, sums, 1)()

    size = (tmp_path / "f.safetensors").stat().st_size
    assert factor_bytes(specs, block=64) == pytest.approx(size, rel=0.05)  # header, diagonals
