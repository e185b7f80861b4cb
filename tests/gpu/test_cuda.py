"""The torch implementation on a CUDA device does what it does on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from conversions import small_config
from tiny import make_tiny

from exl2flow.flows.local import run_locally
from exl2flow.kernels import get_ops
from exl2flow.quant.candidates import CANDIDATES
from exl2flow.quant.gptq import RoundingJob, round_matrices
from exl2flow.quant.hessian import HessianFactor, HessianSum, factor

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


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_panel_is_rounded_to_the_same_codes(weight: torch.Tensor, bits: int) -> None:
    scales, half = torch.full((N,), 0.1), torch.full((N,), 2.0 ** (bits - 1))
    upper = torch.eye(32) + torch.rand(32, 32).triu(1) / 32

    on_cpu, _ = get_ops("cpu").round_panel(weight[:32].clone(), upper, scales, half)
    arguments = (x.cuda() for x in (weight[:32].clone(), upper, scales, half))
    on_cuda, _ = get_ops("cuda").round_panel(*arguments)

    # fused multiply-adds of the GPU move a value across a rounding border now and then
    assert (on_cuda.cpu() != on_cpu).float().mean() < 1e-3


@pytest.mark.parametrize("row", [0, 4, 12, 18])
def test_a_matrix_is_rounded_as_well(weight: torch.Tensor, hessian: torch.Tensor, row: int) -> None:
    params = CANDIDATES["attention"][row]["q_proj"]

    def error(item: HessianFactor, matrix: torch.Tensor) -> float:
        (rounded,) = round_matrices([RoundingJob(weight=matrix, params=params)], item)
        return item.relative_error(matrix, rounded.dequantize().float())

    on_cpu = error(factor(hessian, name="q"), weight)
    on_cuda = error(factor(hessian.cuda(), name="q"), weight.cuda())

    assert on_cuda == pytest.approx(on_cpu, rel=0.02)  # one flipped code changes all that follow


def test_a_conversion_runs_on_the_device(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "source")

    conversion = run_locally(small_config(source, tmp_path / "out", device="cuda", bpw=6.0))

    report = json.loads((conversion.stages["validate"] / "report.json").read_bytes())
    assert report["score"]["kl_divergence"] < 0.1
    manifest = json.loads((conversion.stages["quantize"] / "manifest.json").read_bytes())
    assert manifest["device"] == "cuda"
