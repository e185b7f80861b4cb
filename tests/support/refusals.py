"""Conversions whose source was changed, and what speaks against them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import small_config
from safetensors.torch import load_file, save_file

from exl2flow.core.errors import PreflightFailed
from exl2flow.core.options.config import ConversionConfig
from exl2flow.pipeline.stages import STAGES
from exl2flow.quant.forecast.preflight import preflight


def config_of(source: Path, **values: object) -> ConversionConfig:
    return small_config(source, source.parent / "out", **values)


def problems_of(config: ConversionConfig) -> list[str]:
    with pytest.raises(PreflightFailed) as refusal:
        preflight(config, STAGES)
    return str(refusal.value).splitlines()


def change_tensors(source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(source: Path, **values: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
