"""Tiny checkpoints with an MTP block, as published files have it, and transformers' of it."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, reference_model
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

QWEN = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "mtp_block.": "mtp.layers.0.",
    "post_norm.": "mtp.norm.",
}
GLM = {
    "post_norm.": "model.layers.2.shared_head.norm.",
    "mtp_block.": "model.layers.2.",
    "": "model.layers.2.",
}


def with_block(name: str, folder: Path) -> tuple[Path, Any, MtpModel]:
    """Write a checkpoint with a block; return it, and transformers' model and block."""
    source = make_checkpoint(name, folder)
    model = reference_model(name, source)
    is_layer = name == "glm4-moe"
    model.config.num_mtp_layers = 1
    if not is_layer:
        model.config.mtp_layer_types = ["full_attention"]
    block = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    layer = block.layers[0]
    for key, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
        with torch.no_grad():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise * noise.shape[-1] ** -0.5)
        tensors |= stored(key, parameter.detach(), GLM if is_layer else QWEN)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source, model, block


def stored(key: str, tensor: torch.Tensor, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return a parameter as published files have it, each expert by itself."""
    begin = next(theirs for theirs in names if key.startswith(theirs))
    start, _, last = (names[begin] + key.removeprefix(begin)).rpartition(".")
    if tensor.dim() != 3:
        return {f"{start}.{last}": tensor.clone()}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
    return {
        f"{start}.{expert}.{part}.weight": weight.clone()
        for expert, matrix in enumerate(tensor)
        for part, weight in zip(parts, matrix.chunk(len(parts)), strict=True)
    }
