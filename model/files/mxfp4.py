"""Weights of 4-bit floats (mxfp4): 32 in-features share a scale, a power of two without sign.

A byte holds two elements of 1 sign, 2 exponent and 1 fraction bits, the lower half first.
value = element · 2^(scale - 127) in fp32, then rounded to fp16.

Nothing calls this yet: packed experts, the only published weights of this form, will.
"""

import torch

from exl2flow.core.errors import NonFiniteState, TensorShapeError

ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the other eight are their negatives
BLOCK_BYTES = 16
STRIPE = 1 << 16  # blocks that are decoded at a time


def decode(blocks: torch.Tensor, scales: torch.Tensor, *, names: tuple[str, str]) -> torch.Tensor:
    """Return the values of a weight, fp16 (…, 32 g).

    Args:
        blocks: uint8 (…, g, 16).
        scales: exponents, uint8 (…, g) or the same bytes as E8M0.
        names: of both, for messages.

    Raises:
        TensorShapeError: they are no blocks and their scales.
        NonFiniteState: a scale is NaN, or a value does not fit fp16.
    """
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    are_bytes = blocks.dtype == scales.dtype == torch.uint8
    if not are_bytes or blocks.dim() < 2 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise TensorShapeError(
            f"`{names[0]}` is {blocks.dtype} of shape {tuple(blocks.shape)}, `{names[1]}` "
            f"{scales.dtype} of {tuple(scales.shape)}, which are no blocks of {BLOCK_BYTES} bytes "
            "and their scales; check that both belong to one model"
        )
    elements = torch.tensor([*ELEMENTS, *(-value for value in ELEMENTS)])
    pairs = torch.stack([elements.repeat(16), elements.repeat_interleave(16)], dim=1)  # by byte
    values = torch.empty(scales.numel(), 2 * BLOCK_BYTES, dtype=torch.float16)
    factors = scales.reshape(-1, 1).view(torch.float8_e8m0fnu)
    for part, codes, factor in zip(
        *(torch.split(x, STRIPE) for x in (values, blocks.reshape(-1, BLOCK_BYTES), factors)),
        strict=True,
    ):
        part.copy_(pairs[codes.int()].flatten(1).mul_(factor.float()))
        if not part.isfinite().all():
            raise NonFiniteState(
                f"`{names[0]}` holds values that do not fit fp16, or `{names[1]}` NaN; download "
                "the model again, or use an unquantized one"
            )
    return values.view(*scales.shape[:-1], -1)
