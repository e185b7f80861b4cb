"""Conversions of families on a GPU, with gradients and tuning."""

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from conversions import small_config
from decoders import build_decoder
from tiny import VOCAB_SIZE

from exl2flow.core.options.config import CalibrationOptions
from exl2flow.inference import load_model
from exl2flow.model import CanonicalTensors, resolve
from exl2flow.pipeline.local import run_locally

pytestmark = pytest.mark.gpu

NAMES = (  # biases, norms after sublayers, parallel blocks, MLPs without a gate, two ropes, none
    "phi3",
    "qwen2.5-vl",
    "glm4",
    "gemma2",
    "gemma3-text",
    "cohere2",
    "starcoder2",
    "olmo3",
    "granite4-no-rope",
    "gpt2",
    "qwen2-moe",  # a shared expert
    "gpt-oss",
    "dbrx",
    "llama4",
)


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_family_converts_and_runs(name: str, tmp_path: Path) -> None:
    tune = {"steps": 2, "tokens": 32, "interval": 1, "held_out_rows": 1}
    source = make_checkpoint(name, tmp_path / "model", dtype=torch.float16)
    rows = CalibrationOptions(rows=4, row_tokens=64, measure_rows=1, measure_row_tokens=64)
    options = {"tune": tune, "calibration": rows, "rounding": {"block_steps": 2}}
    config = small_config(source, tmp_path / "out", bpw=7.0, device="cuda", **options)
    with torch.inference_mode(False):
        run_locally(config)
    ids = torch.arange(24)[None] * 7 % VOCAB_SIZE

    found = load_model(config.out, device="cuda").decoder.forward(ids.cuda()).cpu()

    expected = load_model(config.out, device="cpu").decoder.forward(ids)
    assert (found - expected).norm() <= 2e-2 * expected.norm()
    spec = resolve(source)
    original = build_decoder(spec, CanonicalTensors(spec), dtype=torch.float32, device="cpu")
    assert (expected - original.forward(ids)).norm() < 0.15 * expected.norm()
