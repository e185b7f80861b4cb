"""Linear maps: dense, quantized and decoded once on load, or quantized as kernels read them.

Padding is cut from the weight when a map is built, so outputs have exactly `out_features` columns.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.kernels import (
    CHUNK_ELEMENTS,
    LARGEST_HALF,
    PANEL_ROWS,
    PackedMatrix,
    get_ops,
)
from exl2flow.model.exl2 import QuantizedMatrix, is_quantized, padded_columns, tensor_names
from exl2flow.model.gptq import GptqMatrix, gptq_names, is_gptq
from exl2flow.model.spec import ProjectionSpec
from exl2flow.model.weights import TensorFiles


class Linear(Protocol):
    """y = x Wᵀ + bias over the last axis; `weight` is (n, k) without padded rows."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def bias(self) -> torch.Tensor | None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        ...


class DenseLinear:
    """A map with a floating-point weight."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out_features: int | None = None,
    ) -> None:
        """Take a weight (n, k) and a bias (n,), of which the first `out_features` are used."""
        self.weight = weight[:out_features]
        self.bias = None if bias is None else bias[:out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        return product(x, self.weight, self.bias)


class StoredMatrix(Protocol):
    """What a file holds of a quantized matrix, in any format."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def bias(self) -> torch.Tensor | None: ...

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield columns, and what stands there, fp16 (k, c)."""
        ...

    def laid_out(self) -> PackedMatrix:
        """Return the matrix as kernels read it when a model runs."""
        ...

    def to(self, device: torch.device | str) -> "StoredMatrix":
        """Return the matrix on a device."""
        ...


class QuantizedLinear:
    """A map stored in a quantized form; `matrix` is what the file holds."""

    def __init__(
        self,
        matrix: StoredMatrix,
        *,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Dequantize to `dtype`; of the padded columns the first `out_features` are used."""
        self.matrix = matrix
        k, _ = matrix.shape
        self.weight = torch.empty(out_features, k, dtype=dtype, device=device)
        for columns, part in matrix.parts():
            rows = self.weight[columns]
            rows.copy_(part.T[: len(rows)])
        bias = matrix.bias
        self.bias = None if bias is None else bias[:out_features].to(device=device, dtype=dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        return product(x, self.weight, self.bias)


class PackedLinear:
    """A map that stays quantized in the memory of its device; it computes in fp16."""

    def __init__(
        self, matrix: StoredMatrix, *, out_features: int, device: torch.device | str
    ) -> None:
        """Lay out what a file holds; of the padded columns the first `out_features` are used."""
        there = matrix.to(device)
        self.matrix = there.laid_out().cut(out_features)
        self.bias = None if there.bias is None else there.bias[:out_features].half()

    @property
    def weight(self) -> torch.Tensor:
        """The decoded matrix fp16 (n, k), made anew."""
        decoded = get_ops(self.matrix.codes.device).decode_packed(self.matrix)
        return torch.empty_like(decoded).index_copy_(1, self.matrix.order, decoded)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        return maps([self], x)[0]


def maps(linears: Sequence[Linear], x: torch.Tensor) -> list[torch.Tensor]:
    """Return what maps make of the same input; packed ones may be multiplied together."""
    packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
    if len(packed) < len(linears):
        return [linear(x) for linear in linears]
    flat = narrowed(x).reshape(-1, x.shape[-1])
    found = get_ops(x.device).multiply(flat, [linear.matrix for linear in packed])
    return [
        (y if linear.bias is None else y + linear.bias).view(*x.shape[:-1], -1).to(x.dtype)
        for y, linear in zip(found, packed, strict=True)
    ]


def share_orders(linears: Iterable[Linear]) -> None:
    """Let packed maps that have their rows in the same order know it."""
    orders: list[torch.Tensor] = []
    for linear in linears:
        if isinstance(linear, PackedLinear):
            order = linear.matrix.order
            same = next((found for found in orders if torch.equal(found, order)), order)
            linear.matrix = replace(linear.matrix, order=same)
            orders.append(same)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """Return x as fp16, cut off at its range."""
    return x if x.dtype == torch.float16 else x.half().clamp_(-LARGEST_HALF, LARGEST_HALF)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x Wᵀ + bias, (…, n), in the dtype of x.

    fp32 inputs meet an fp16 weight as fp16 numbers, whose products a GPU adds up in fp32.
    """
    if x.dtype == weight.dtype:
        return functional.linear(x, weight, bias)
    flat = torch.mm(narrowed(x).flatten(0, -2), weight.t(), out_dtype=x.dtype)
    put = flat.view(*x.shape[:-1], -1)
    return put if bias is None else put + bias


def is_packed(key: str, names: Container[str]) -> bool:
    """Tell whether the linear `key` is stored in EXL2 or GPTQ form among these tensor names."""
    return is_quantized(key, names) or is_gptq(key, names)


def load_linear(
    tensors: TensorFiles,
    projection: ProjectionSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    any_rows: bool = False,
    zero_offset: int = 1,
    packed: bool = False,
) -> Linear:
    """Load a projection in the form in which the files hold it: EXL2, GPTQ or plain.

    Args:
        tensors: the model's files.
        projection: what to load.
        dtype: of weight and bias in memory.
        device: where they go.
        any_rows: accept more or fewer out-features than the projection states; more are cut.
        zero_offset: of GPTQ matrices, as of `ModelSpec.zero_offset`.
        packed: leave quantized matrices quantized; then they compute in fp16.

    Raises:
        MissingTensor: its weight, or a bias that the config implies, is absent.
        TensorShapeError: its shape is not the one that the config implies.
    """
    key = projection.key
    if projection.has_bias and f"{key}.bias" not in tensors:
        raise MissingTensor(
            f"`{key}.bias` is missing in `{tensors.folder}` although `config.json` implies a bias"
        )
    matrix = _read_matrix(tensors, projection, zero_offset)
    if matrix is not None:
        _check_shape(projection, (matrix.shape[1], matrix.shape[0]), any_rows=any_rows)
        if packed and matrix.shape[0] % PANEL_ROWS == 0:
            return PackedLinear(matrix, out_features=projection.out_features, device=device)
        return QuantizedLinear(
            matrix, out_features=projection.out_features, dtype=dtype, device=device
        )
    weight = tensors.read(f"{key}.weight")
    _check_shape(projection, tuple(weight.shape), any_rows=any_rows)
    bias = tensors.read(f"{key}.bias") if projection.has_bias else None
    return DenseLinear(
        moved(weight, device, dtype),
        None if bias is None else moved(bias, device, dtype),
        out_features=projection.out_features,
    )


def moved(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a file on a device, which converts what travels in the file's dtype."""
    if tensor.dtype == dtype:
        return tensor.to(device, non_blocking=tensor.is_pinned())
    found = torch.empty(tensor.shape, dtype=dtype, device=device)
    rows = max(1, CHUNK_ELEMENTS * len(tensor) // tensor.numel())  # a head is large even once
    for part, source in zip(torch.split(found, rows), torch.split(tensor, rows), strict=True):
        part.copy_(source.to(device, non_blocking=tensor.is_pinned()))
    return found


def _read_matrix(
    tensors: TensorFiles, projection: ProjectionSpec, zero_offset: int
) -> StoredMatrix | None:
    """Read a matrix that is stored in a quantized form, else None."""
    key = projection.key

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        bias = [f"{key}.bias"] if projection.has_bias else []
        return {name: tensors.read(name) for name in (*names, *bias) if name in tensors}

    if is_quantized(key, tensors):
        return QuantizedMatrix.from_tensors(key, read(tensor_names(key)))
    if not is_gptq(key, tensors):
        return None
    bias = f"{key}.bias"  # some programs write zeros where there is none
    if not projection.has_bias and bias in tensors and tensors.read(bias).any():
        raise TensorShapeError(
            f"`{bias}` is not zero, `config.json` implies none; check that both belong to one model"
        )
    return GptqMatrix.from_tensors(key, read(gptq_names(key)), zero_offset=zero_offset)


def _check_shape(projection: ProjectionSpec, shape: tuple[int, ...], *, any_rows: bool) -> None:
    """Compare a stored (n, k) with the config; rows may be padded as the format pads them."""
    n, k = projection.out_features, projection.in_features
    is_known = shape in ((n, k), (padded_columns(n), k))
    if not is_known and not (any_rows and shape[1:] == (k,)):
        raise TensorShapeError(
            f"`{projection.key}` has shape {shape}, `config.json` implies {(n, k)}; check that "
            "both belong to one model"
        )
