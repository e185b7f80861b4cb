"""The torch implementation gives the same results on a CUDA device as on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from conversions import small_config
from roundings import whole_groups
from tiny import make_tiny

from exl2flow.core.options.config import ScaleSearch
from exl2flow.kernels import get_ops, times_output
from exl2flow.pipeline.local import run_locally
from exl2flow.quant.measure.candidates import CANDIDATES, parse_params
from exl2flow.quant.rounding.descent import Metric, refine
from exl2flow.quant.rounding.error_feedback import RoundingJob, round_matrices
from exl2flow.quant.rounding.hessian import (
    HessianFactor,
    HessianSum,
    MixedHessian,
    factor,
    relative_error,
)

pytestmark = pytest.mark.gpu

K, N = 256, 96


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(K, N)


@pytest.fixture
def hessian() -> torch.Tensor:
    total = HessianSum(K)
    total.add(torch.randn(1024, K) * torch.linspace(0.1, 3, K))
    return total.mean()


@pytest.fixture
def output() -> torch.Tensor:
    """An output metric in three blocks, with strong correlations."""
    noise = torch.randn(3, N // 3, 8)
    return noise @ noise.mT / 8 + 0.3 * torch.eye(N // 3)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_panel_is_rounded_to_the_same_codes(weight: torch.Tensor, bits: int) -> None:
    scales, half = torch.full((N,), 0.1), torch.full((N,), 2.0 ** (bits - 1))
    upper = torch.eye(32) + torch.rand(32, 32).triu(1) / 32

    on_cpu, _ = get_ops("cpu").round_panel(weight[:32].clone(), upper, scales, half)
    arguments = (x.cuda() for x in (weight[:32].clone(), upper, scales, half))
    on_cuda, _ = get_ops("cuda").round_panel(*arguments)

    # fused multiply-adds of the GPU occasionally move a value across a rounding edge
    assert (on_cuda.cpu() != on_cpu).float().mean() < 1e-3


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_columns_find_the_same_scales(weight: torch.Tensor, bits: int) -> None:
    weights = torch.rand(64) + 0.1

    x = weight[None, :64]
    on_cpu = get_ops("cpu").search_columns(x, whole_groups(x, bits), weights)
    on_cuda = get_ops("cuda").search_columns(x.cuda(), whole_groups(x, bits), weights.cuda())

    assert float(on_cuda[1]) == float(on_cpu[1])
    assert (on_cuda[0].cpu() != on_cpu[0]).float().mean() < 0.05  # ties of costs


def factored(hessian: torch.Tensor) -> HessianFactor:
    return factor(MixedHessian.plain(hessian), damping=0.05, name="q")


@pytest.mark.parametrize("row", [0, 4, 12, 18])
@pytest.mark.parametrize("search", ["grid", "column"])
def test_a_matrix_is_rounded_as_well(
    weight: torch.Tensor, hessian: torch.Tensor, row: int, search: ScaleSearch
) -> None:
    params = CANDIDATES["attention"][row]["q"]

    def error(covariance: torch.Tensor, matrix: torch.Tensor) -> float:
        item = factored(covariance)
        job = RoundingJob(weight=matrix, params=params)
        (rounded,) = round_matrices([job], item, search=search)
        return float(relative_error(covariance, matrix, rounded.dequantize().float()))

    on_cpu = error(hessian, weight)
    on_cuda = error(hessian.cuda(), weight.cuda())

    assert on_cuda == pytest.approx(on_cpu, rel=0.02)  # one flipped code changes all that follow


@pytest.mark.parametrize("cell", ["2 g64", "3/2@0.25/0.75 g64", "4 g128"])
def test_a_matrix_is_refined_as_well(
    weight: torch.Tensor, hessian: torch.Tensor, output: torch.Tensor, cell: str
) -> None:
    def loss(item: HessianFactor, matrix: torch.Tensor, blocks: torch.Tensor) -> float:
        job = RoundingJob(weight=matrix, params=parse_params(cell), output=blocks)
        (start,) = round_matrices([job], item, search="column")
        metric = Metric(hessian=item.hessian.matrix(), output=blocks)
        refined = refine(start, matrix, metric, rounds=2, sweeps=2)
        error = (refined.dequantize().float() - matrix)[item.perm]
        return float((metric.hessian @ times_output(error, metric.output) * error).sum())

    on_cpu = loss(factored(hessian), weight, output)
    on_cuda = loss(factored(hessian.cuda()), weight.cuda(), output.cuda())

    assert on_cuda == pytest.approx(on_cpu, rel=0.05)  # other codes, as good ones


def test_a_conversion_runs_on_the_device(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source")

    conversion = run_locally(small_config(source, tmp_path / "out", device="cuda", bpw=6.0))

    report = json.loads((conversion.stages["validate"] / "report.json").read_bytes())
    assert report["score"]["kl_divergence"] < 0.1
    manifest = json.loads((conversion.stages["quantize"] / "manifest.json").read_bytes())
    assert manifest["device"] == "cuda"
