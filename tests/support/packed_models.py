"""Tiny models of any family whose maps are quantized."""

from collections.abc import Callable
from pathlib import Path

import torch
from checkpoints import make_checkpoint
from decoders import build_decoder
from safetensors.torch import save_file
from tiny import FAMILY_CONFIGS, make_tiny

from exl2flow.kernels import Group
from exl2flow.model import (
    CanonicalTensors,
    Decoder,
    ModelSpec,
    QuantizedMatrix,
    Sublayer,
    TensorFiles,
    expected_tensors,
    resolve,
)

# family → products before the first attention, before the second one, and after it
LINKS = {
    "llama": [1, 4, 3],
    "qwen2": [1, 4, 3],  # biases
    "qwen3": [1, 4, 3],  # norms of heads
    "gemma2": [1, 4, 3],  # norms before and after, soft-caps
    "olmo2": [1, 4, 3],  # norms after only
    "cohere": [2, 3, 1],  # parallel, LayerNorm
    "cohere-qk-norm": [2, 3, 1],  # a norm for each head
    "granite": [1, 4, 3],  # multipliers
    "starcoder2": [1, 4, 3],  # LayerNorm with biases, no gate
    "nemotron": [1, 4, 3],  # squared ReLU
    "smollm3": [1, 4, 3],  # a layer without positions
    "hunyuan": [1, 4, 3],  # norms of heads after rotation
    "glm4": [1, 4, 3],  # interleaved, partial rotation
    "gpt2": [1, 4, 3],  # learned positions
    "qwen3-moe": [1, 1, 0],  # experts, which begin a chain anew
    "glm4-moe": [1, 4, 0],  # behind a dense layer, and with a shared one
    "gpt-oss": [1, 1, 0],
}


def quantized(
    k: int, n: int, perm: torch.Tensor, bias: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Return a random matrix whose results are about as large as what it multiplies."""
    half = k // 64 * 32
    groups = [Group(bits=5, start=0, rows=half)] if half else []
    groups.append(Group(bits=3, start=half, rows=k - half))
    codes = [torch.randint(0, 1 << group.bits, (group.rows, n)) for group in groups]
    sizes = torch.tensor([2.0**-group.bits for group in groups])
    return QuantizedMatrix.encode(
        codes=torch.cat(codes).to(torch.uint8),
        groups=groups,
        scale_codes=torch.randint(8, 16, (len(groups), n), dtype=torch.uint8),
        max_scales=(4 * sizes * k**-0.5).half(),
        perm=perm,
        bias=None if bias is None else bias.half(),
    )


def make_packed(family: str, folder: Path, **overrides: object) -> ModelSpec:
    """Write a tiny model whose maps are quantized; those of one input have one order of rows.

    overrides: of `make_tiny`.
    """
    make: Callable[..., Path] = make_tiny if family in FAMILY_CONFIGS else make_checkpoint
    spec, path = resolve(make(family, folder, **overrides)), folder / "model.safetensors"
    source = CanonicalTensors(spec)
    tensors = {name: source.read_floating(name) for name in expected_tensors(spec)}
    for sublayer in spec.sublayers:
        perms: dict[str, torch.Tensor] = {}
        for p in sublayer.projections:
            del tensors[f"{p.key}.weight"]
            perm = perms.setdefault(p.capture, torch.randperm(p.in_features))
            bias = tensors.pop(f"{p.key}.bias", None)
            matrix = quantized(p.in_features, p.out_features, perm, bias)
            tensors |= matrix.to_tensors(p.key)
    save_file(tensors, path)
    return spec


def sublayers_of(spec: ModelSpec) -> list[Sublayer]:
    return [*decoder_of(spec).sublayers]


def decoder_of(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> Decoder:
    return build_decoder(
        spec, TensorFiles(spec.source_dir), dtype=dtype, device=device, packed=True
    )
