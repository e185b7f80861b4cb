"""A conversion never exceeds the GPU memory that its plan forecasts."""

from pathlib import Path

import pytest
import torch
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.memory import limit_memory
from exl2flow.core.progress import silent
from exl2flow.flows.conversion import open_pipeline
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.tasks.stages import STAGES

pytestmark = pytest.mark.gpu


def test_no_stage_takes_more_memory_than_the_plan_says(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    config = small_config(source, tmp_path / "out", device="cuda", quality="standard")
    plan = preflight(config)
    assert plan.card is not None
    assert plan.card.name == torch.cuda.get_device_name()
    pipeline = open_pipeline(config, STAGES)

    for name in pipeline.stages:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipeline.run(name, progress=silent)
        need = plan.needs.get(name)
        if need is not None and need.gpu_memory_bytes:
            peak = torch.cuda.max_memory_allocated() - before
            assert peak <= need.gpu_memory_bytes, name


def test_a_conversion_in_little_memory_ends_well(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", num_hidden_layers=4)
    config = small_config(
        source,
        tmp_path / "out",
        device="cuda",
        quality="standard",
        max_memory="2GB",
        calibration={"rows": 24, "row_tokens": 2048, "measure_rows": 8, "measure_row_tokens": 2048},
    )
    pipeline = open_pipeline(config, STAGES)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        for name in pipeline.stages:
            pipeline.run(name, progress=silent)
            assert torch.cuda.max_memory_reserved() < 2e9, name
    finally:
        limit_memory(torch.device("cuda"), None)

    assert (config.out / "model.safetensors").is_file()
