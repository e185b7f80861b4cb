"""Ranks divide the matrices of a sublayer, in runs that do not depend on their number."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from exl2flow.core.runtime.ranks import WorkRanks
from exl2flow.model import CanonicalTensors, Sublayer, SublayerSpec, build_sublayer, resolve
from exl2flow.quant.quantize import dealt
from exl2flow.quant.quantize.dealt import deal_runs
from exl2flow.quant.rounding.together import runs_together


@pytest.fixture
def sublayer(tmp_path: Path) -> Sublayer:
    """Experts of a layer."""
    spec = resolve(make_tiny("qwen2-moe", tmp_path / "model", num_experts=5))
    group = next(s for s in spec.sublayers if s.group is not None)
    tensors = CanonicalTensors(spec)
    return build_sublayer(spec, group, tensors, dtype=torch.float32, device="cpu")


def on_a_gpu(spec: SublayerSpec, captures: list[str], device: torch.device) -> list[list[str]]:
    return runs_together(spec, captures, torch.device("cuda"))


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_run_is_at_one_rank_whatever_their_number(
    sublayer: Sublayer, is_gpu: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gpu:
        monkeypatch.setattr(dealt, "runs_together", on_a_gpu)
    alone, _ = deal_runs(sublayer, WorkRanks())

    shares = [deal_runs(sublayer, WorkRanks(rank, count)) for rank in range(count)]

    in_order = partial(sorted, key=str)
    assert in_order(run for own, _ in shares for run in own) == in_order(alone)
    assert all(owners == shares[0][1] for _, owners in shares)
    for rank, (own, owners) in enumerate(shares):
        assert {owners[capture] for run in own for capture in run} <= {rank}
    captures = {p.capture for p in sublayer.spec.projections}
    assert {capture for run in alone for capture in run} == captures == shares[0][1].keys()
    assert (max(map(len, alone)) > 1) is is_gpu
