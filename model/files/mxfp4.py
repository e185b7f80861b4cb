"""Weights of 4-bit floats (mxfp4): 32 in-features share a scale, a power of two without sign.

A byte holds two elements of 1 sign, 2 exponent and 1 fraction bits, the lower half first.
value = element · 2^(scale - 127) in fp32, then rounded to fp16.

A weight `X` of shape (…, 32 g) is stored as `X_blocks`, (…, g, 16) bytes, and `X_scales`, (…, g).
"""

import torch

from exl2flow.core.errors import NonFiniteState, TensorShapeError

ELEMENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the other eight are their negatives
BLOCK_BYTES = 16
BLOCK = 2 * BLOCK_BYTES  # elements
BLOCKS, SCALES = "_blocks", "_scales"  # ends of names
MXFP4 = "MXFP4"  # what the dtype of blocks with scales is called here; files say `BYTES`
BYTES, SCALE_DTYPES = "U8", ("U8", "F8_E8M0")
DECODED = torch.float16
STRIPE = 1 << 16  # blocks that are decoded at a time

Shape = tuple[int, ...]


def are_blocks(name: str, dtype: str, shape: Shape) -> bool:
    """Tell whether a stored tensor is that of a weight in this form."""
    is_named = name.endswith(BLOCKS)
    return is_named and dtype == BYTES and len(shape) > 1 and shape[-1] == BLOCK_BYTES


def scale_name(name: str) -> str:
    """Return the name of the scales of blocks."""
    return name.removesuffix(BLOCKS) + SCALES


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
    values = torch.empty(scales.numel(), BLOCK, dtype=DECODED)
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
