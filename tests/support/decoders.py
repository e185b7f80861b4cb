"""Whole models on one device, without a tokenizer."""

import torch

from exl2flow.model import (
    Decoder,
    ModelSpec,
    TensorFiles,
    build_embedding,
    build_head,
    build_sublayer,
)


def build_decoder(
    spec: ModelSpec,
    tensors: TensorFiles,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: bool = False,
) -> Decoder:
    """Load a whole model onto one device; `packed` as in `made_linear`."""
    embedding = build_embedding(spec, tensors, dtype=dtype, device=device)
    return Decoder(
        spec,
        embedding=embedding,
        sublayers=[
            build_sublayer(spec, sublayer, tensors, dtype=dtype, device=device, packed=packed)
            for sublayer in spec.sublayers
        ],
        head=build_head(
            spec, tensors, dtype=dtype, device=device, embedding=embedding, packed=packed
        ),
    )
