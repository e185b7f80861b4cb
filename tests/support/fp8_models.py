"""Checkpoints in fp8, in each naming that is published, and their decoded twins."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny

FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
BLOCK = 32  # rows and columns, so that tiny matrices have several, and some that are not whole


def quantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a weight (n, k) over scales that are expanded to its shape."""
    return (weight / scale).clamp(-448, 448).to(FP8)


def expanded(scales: torch.Tensor, shape: torch.Size, rows: int, columns: int) -> torch.Tensor:
    """Return the scale of each element, by a loop over blocks."""
    found = torch.zeros(shape)
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            found[i : i + rows, j : j + columns] = scales[i // rows, j // columns].float()
    return found


def blocks(dtype: torch.dtype) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def split(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        scales = torch.zeros(-(-n // BLOCK), -(-k // BLOCK))
        for i, j in torch.ones_like(scales).nonzero().tolist():
            rows, columns = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = 2 ** torch.log2(weight[rows, columns].abs().max() / 448).ceil()
        if dtype != torch.float8_e8m0fnu:
            scales *= 0.83
        scales = scales.to(dtype)
        of_each = expanded(scales, weight.shape, BLOCK, BLOCK)
        return {"weight": quantized(weight, of_each), "weight_scale_inv": scales}, of_each

    return split


def whole(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    tensors = {"weight": quantized(weight, scale), "weight_scale_inv": scale.clone()}
    return tensors | {"activation_scale": torch.tensor(0.3)}, scale.expand(weight.shape)


def channels(shape: tuple[int, ...]) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def split(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scales = weight.abs().amax(dim=1, keepdim=True) / 448
        tensors = {"weight": quantized(weight, scales), "weight_scale": scales.view(shape)}
        return tensors | {"input_scale": torch.ones(1)}, scales.expand(weight.shape)

    return split


BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"strategy": "channel", "block_structure": None}}},
}
# form → (the block in config.json, what splits a weight into stored tensors and all its scales)
FORMS = {
    "blocks, fp32": (BLOCKS, blocks(torch.float32)),
    "blocks, bf16": (BLOCKS, blocks(torch.bfloat16)),
    "blocks, e8m0": (BLOCKS, blocks(torch.float8_e8m0fnu)),
    "tensor": ({"quant_method": "fp8", "weight_block_size": None}, whole),
    "channels (n, 1)": (COMPRESSED, channels((-1, 1))),
    "channels (n,)": ({"quant_method": "fbgemm_fp8"}, channels((-1,))),
}


def make_fp8(
    folder: Path,
    form: str,
    family: str = "llama",
    *,
    make: Callable[..., Path] = make_tiny,
    **config: object,
) -> Path:
    """Write a tiny model in fp8 to `folder/fp8`, and its decoded twin in fp16 to `folder/plain`.

    Returns:
        The former.
    """
    source, plain = (make(family, folder / name, **config) for name in ("fp8", "plain"))
    declared, split = FORMS[form]
    set_config(source, quantization_config=declared)
    stored: Tensors = {}
    decoded: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, scales = split(tensor)
            stored |= {f"{name.removesuffix('weight')}{part}": t for part, t in parts.items()}
            decoded[name] = (parts["weight"].float() * scales.float()).half()
        else:
            stored[name] = decoded[name] = tensor.half()
    save_file(stored, source / "model.safetensors")
    save_file(decoded, plain / "model.safetensors")
    return source


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
