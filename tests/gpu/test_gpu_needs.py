"""A conversion never exceeds the GPU memory that its plan forecasts, and needs the least."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversions import small_config
from tiny import make_tiny

from exl2flow.core.runtime.progress import silent
from exl2flow.model import resolve
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.least import stage_works
from exl2flow.quant.forecast.preflight import preflight

pytestmark = pytest.mark.gpu

LIMITED = Path(__file__).parents[1] / "support" / "limited.py"


@pytest.mark.parametrize("block_steps", [0, 2])
def test_no_stage_takes_more_memory_than_the_plan_says(block_steps: int, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    rounding = {"block_steps": block_steps}
    config = small_config(
        source, tmp_path / "out", device="cuda", quality="standard", rounding=rounding
    )
    plan = preflight(config, STAGES, anew=True)
    assert plan.card is not None
    assert plan.card.name == torch.cuda.get_device_name()
    works = stage_works(config, STAGES, resolve(source), plan.card.memory)
    least = {work.stage: work.least_bytes for work in works}
    pipeline = open_pipeline(config, STAGES)

    for name in pipeline.stages:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pipeline.run(name, progress=silent)
        need = plan.needs.get(name)
        if need is not None and need.gpu_memory_bytes:
            peak = torch.cuda.max_memory_allocated() - before
            assert least.get(name, 0) <= peak <= need.gpu_memory_bytes, name


def test_a_conversion_in_little_memory_ends_well(tmp_path: Path) -> None:
    """In a process of its own: the limit counts what other tests keep."""
    source = make_tiny("llama", tmp_path / "model", num_hidden_layers=4)

    command = [sys.executable, LIMITED, source, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert all(reserved < 2e9 for reserved in json.loads(done.stdout).values()), done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()
