"""Weights of 8-bit floats beside their scales, as models are published; they are decoded on read.

value = float · scale in fp32, then rounded to fp16. There is one scale for the tensor, one for each
out-feature, or one for each block of `quantization_config.weight_block_size`.
"""

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch

from exl2flow.core.errors import SourceModelError, TensorShapeError
from exl2flow.model.config.fields import Fields

FP8 = "F8_E4M3"
LARGEST = 448.0  # value of that dtype
DECODED = torch.float16
SUFFIX = ".weight"
SCALES = ("weight_scale_inv", "weight_scale")  # the latter of compressed-tensors and fbgemm
SCALE_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E8M0": torch.float8_e8m0fnu,
}
ACTIVATIONS = ("input_scale", "activation_scale", "output_scale", "input_scale_ub")  # unused here
CACHE = ("k_scale", "v_scale")  # of an fp8 cache, beside the linears or below them
DEFAULT_BLOCK = (128, 128)  # where the config names none, as transformers assumes
STRIPE = 128  # rows that are decoded at a time

Shape = tuple[int, ...]


def scale_name(name: str, names: Container[str]) -> str | None:
    """Return the name of the scales of the weight `name` among these tensor names."""
    names_of_scales = (f"{name.removesuffix(SUFFIX)}.{scale}" for scale in SCALES)
    return next((scale for scale in names_of_scales if scale in names), None)


def unused_names(name: str) -> Iterator[str]:
    """Yield the names of scales that concern activations and cache, not the weight `name`."""
    key = name.removesuffix(SUFFIX)
    yield from (f"{key}.{suffix}" for suffix in (*ACTIVATIONS, *CACHE))
    yield from (f"{key.rpartition('.')[0]}.{suffix}" for suffix in CACHE)


def read_block(folder: Path) -> tuple[int, int] | None:
    """Return the rows and columns of a block as `config.json` declares; None: no blocks.

    Raises:
        SourceModelError: the config is unreadable, or the size is not a pair of positive integers.
    """
    path = folder / "config.json"
    values = Fields.load(path).values
    text = values.get("text_config")
    declared = values.get("quantization_config")
    if declared is None and isinstance(text, Mapping):
        declared = text.get("quantization_config")
    if not isinstance(declared, Mapping):
        return DEFAULT_BLOCK
    key, block = _declared(declared)
    if block is None:
        return None
    match block:
        case [int(rows), int(columns)] if min(rows, columns) > 0 and not any(
            size is True for size in block
        ):
            return rows, columns
    raise SourceModelError(
        f"`quantization_config.{key}` in `{path}` is {block}; it must be two positive integers, "
        "rows and columns: fetch the file again"
    )


def _declared(declared: Mapping[str, object]) -> tuple[str, object]:
    """Return the key that holds the block size, and its value."""
    key = "weight_block_size"
    groups = declared.get("config_groups")  # of compressed-tensors
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure") is not None:
            key = f"config_groups.{name}.weights.block_structure"
            return key, weights["block_structure"]
    return key, declared.get(key, [*DEFAULT_BLOCK])


def grid_of(
    shape: Shape, scales: Shape, block: tuple[int, int] | None, *, names: tuple[str, str]
) -> tuple[int, int]:
    """Return how many rows and columns of a weight share a scale.

    Args:
        shape: of the weight.
        scales: the shape of its scales: of one element, (n,), (n, 1), or one for each block.
        block: rows and columns of a block; None: the config declares that there are none.
        names: of the weight and of its scales.

    Raises:
        TensorShapeError: the shapes do not fit each other.
    """
    if len(shape) != 2:
        raise TensorShapeError(
            f"`{names[0]}` is fp8 of shape {shape}; only matrices can be decoded: use an "
            "unquantized model"
        )
    n, k = shape
    if scales in ((), (1,), (1, 1)):
        return max(1, n), max(1, k)
    if scales in ((n,), (n, 1)):
        return 1, max(1, k)
    blocks = None if block is None else (-(-n // block[0]), -(-k // block[1]))
    if block is None or scales != blocks:
        implied = "has no blocks" if block is None else f"has blocks of {block}, hence {blocks}"
        raise TensorShapeError(
            f"`{names[1]}` has shape {scales} for `{names[0]}` of shape {shape}; `config.json` "
            f"{implied}: a scale for the tensor or {n} for its rows would fit, too; check that "
            "both belong to one model"
        )
    return block


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    grid: tuple[int, int],
    out: torch.Tensor,
    *,
    first: int = 0,
) -> bool:
    """Write the values of a weight; return whether all of them are finite in the dtype of `out`.

    Args:
        codes: fp8 (n, k), on the CPU.
        scales: one for each cell of the grid, in rows of the grid, any shape.
        grid: the rows and columns that share a scale, from `grid_of`.
        out: fp16 (n, k), on the CPU.
        first: where the n rows begin in the tensor that the scales belong to.
    """
    (n, k), (rows, columns) = codes.shape, grid
    factors = scales.float().reshape(-1, -(-k // columns))
    whole = k // columns  # the last cell may be narrower
    is_finite = True
    for start in range(0, n, STRIPE):
        values = codes[start : start + STRIPE].float()
        used = factors[(first + start + torch.arange(len(values))) // rows]
        cells = values[:, : whole * columns].view(len(values), whole, columns)
        cells.mul_(used[:, :whole, None])
        values[:, whole * columns :].mul_(used[:, whole:])
        stripe = out[start : start + STRIPE].copy_(values)
        is_finite = is_finite and bool(stripe.isfinite().all())
    return is_finite
