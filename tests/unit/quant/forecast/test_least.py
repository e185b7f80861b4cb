"""The least of `quantize` is held at one moment: its tensors are counted."""

import gc
from pathlib import Path

import pytest
import torch
from conversions import small_config
from measurements import written_in_nats
from tiny import make_tiny

from exl2flow.core.runtime.progress import silent
from exl2flow.core.store.stage import Pipeline
from exl2flow.model import resolve
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.least import stage_works
from exl2flow.quant.rounding import hessian

WIDTH = 512  # of an MLP whose Hessians are larger than everything else


def live_bytes() -> int:
    """Return the bytes of all tensors that exist."""
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values()
    )


def test_what_quantize_holds_while_it_factors_a_hessian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tiny("llama", tmp_path / "m", num_hidden_layers=1, intermediate_size=WIDTH)
    measurement = written_in_nats(tmp_path / "measurement.json", resolve(source))
    config = small_config(source, tmp_path / "out", bpw=4.0, measurement=measurement)
    pipeline = Pipeline(config, STAGES, device="cpu")
    for stage in ("tokenize", "sensitivity", "allocate"):
        pipeline.run(stage, progress=silent)
    before, held = live_bytes(), list[int]()
    factor = hessian.upper_factor

    def counting(turned: torch.Tensor) -> torch.Tensor:
        held.append(live_bytes() - before + turned.nbytes)  # its factor is about to join it
        return factor(turned)

    monkeypatch.setattr(hessian, "upper_factor", counting)
    pipeline.run("quantize", progress=silent)

    works = {work.stage: work for work in stage_works(config, STAGES, resolve(source), 24 * 10**9)}
    least = works["quantize"]
    assert least.part == "model.layers.0.mlp"
    assert 4 * 4 * WIDTH**2 < least.least_bytes <= max(held)
