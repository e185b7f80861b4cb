"""Random adapters as PEFT saves them, and models with the same weights merged by hand."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exl2flow.model import ModelSpec, resolve

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    spec: ModelSpec, *, rank: int, linears: Sequence[str] = ALL, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return A and B of some linears of all layers, whose products are as large as the weights."""
    generator, found = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for p in (p for sublayer in spec.sublayers for p in sublayer.projections):
        if p.name in linears:
            a = torch.randn(rank, p.in_features, generator=generator) * p.in_features**-0.5
            b = torch.randn(p.out_features, rank, generator=generator) * rank**-0.5
            found |= {f"{PREFIX}{p.key}.lora_A.weight": a, f"{PREFIX}{p.key}.lora_B.weight": b}
    return found


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], *, rank: int, alpha: float, **config: Any
) -> Path:
    """Write an adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "init_lora_weights": True}
    (folder / "adapter_config.json").write_text(json.dumps({**common, **config}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def make_adapter(
    folder: Path,
    source: Path,
    *,
    rank: int = 4,
    alpha: float = 4,
    seed: int = 0,
    linears: Sequence[str] = ALL,
    **config: Any,
) -> Path:
    """Write a random adapter for the model in `source`."""
    tensors = adapter_tensors(resolve(source), rank=rank, linears=linears, seed=seed)
    return write_adapter(folder, tensors, rank=rank, alpha=alpha, **config)


def merged(folder: Path, source: Path, *adapters: Path, scaling: float = 1.0) -> Path:
    """Write a model with W + scaling · alpha / r · B A of each adapter in place of W."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for adapter in adapters:
        config = json.loads((adapter / "adapter_config.json").read_text())
        root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in tensors:
            if not name.endswith(".lora_A.weight"):
                continue
            key = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            a, b = (tensors[f"{PREFIX}{key}.lora_{half}.weight"].double() for half in "AB")
            change = scaling * config["lora_alpha"] / root * (b @ a)
            weights[f"{key}.weight"] = (weights[f"{key}.weight"].double() + change).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
