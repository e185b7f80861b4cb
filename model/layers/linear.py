"""Linear maps: dense, quantized and decoded on load, or quantized in the layout of the kernels.

Padding is cut off when a map is built, so outputs have exactly `out_features` columns.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from exl2flow.core.errors import MissingTensor, TensorShapeError
from exl2flow.core.runtime.background import passing, send_async
from exl2flow.kernels import LARGEST_HALF, Boxes, FusedLinear, get_ops
from exl2flow.model.config.gptq_label import UNLABELLED, GptqLabel
from exl2flow.model.config.sublayer_spec import ProjectionSpec
from exl2flow.model.files.exl2 import (
    QuantizedMatrix,
    host_names,
    is_quantized,
    padded_columns,
    tensor_names,
)
from exl2flow.model.files.gptq import GptqMatrix, gptq_host_names, gptq_names, is_gptq, zero_offset
from exl2flow.model.files.weights import TensorFiles

SENT_ELEMENTS = 8 << 20  # of a tensor are sent and converted at a time
StoredMatrix = QuantizedMatrix | GptqMatrix  # as a file stores it
# on a device, one copy of each by its bytes: linears that share one are multiplied together
RowOrders = dict[bytes, torch.Tensor]


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


Stored = StoredMatrix | DenseLinear  # as it is read


class Part(NamedTuple):
    """A map as it was read, and how many of its columns are used."""

    stored: Stored
    out_features: int


class QuantizedLinear(DenseLinear):
    """A map stored in quantized form and decoded on load; `matrix` is the stored form."""

    def __init__(
        self,
        matrix: StoredMatrix,
        *,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Dequantize the first `out_features` of the padded columns to `dtype`."""
        self.matrix = matrix
        k, n = matrix.shape
        weight = torch.empty(min(out_features, n), k, dtype=dtype, device=device)
        for columns, part in matrix.parts():
            rows = weight[columns]
            rows.copy_(part.T[: len(rows)])
        bias = None if matrix.bias is None else matrix.bias[:out_features].to(device, dtype)
        super().__init__(weight, bias)


class PackedLinear:
    """A map that stays quantized in device memory and computes in fp16."""

    def __init__(self, matrix: StoredMatrix, *, out_features: int, orders: RowOrders) -> None:
        """Lay out the first `out_features` of the padded columns of a stored matrix."""
        bias = None if matrix.bias is None else matrix.bias[:out_features].half()
        order = matrix.order  # in main memory, int64 (k,)
        key = order.numpy().tobytes()
        if key not in orders:
            orders[key] = send_async(order, matrix.packed.device)
        self.matrix = matrix.laid_out(orders[key]).cut(out_features, bias)
        self._product = FusedLinear(matrices=(self.matrix,))

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, fp16 (n,)."""
        return self.matrix.bias

    @property
    def weight(self) -> torch.Tensor:
        """The decoded matrix fp16 (n, k), decoded on every access."""
        return get_ops(self.matrix.words.device).decode_packed(self.matrix).T

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        flat = narrowed(x).reshape(-1, x.shape[-1])
        if not len(flat):  # an expert without tokens
            return x.new_empty(*x.shape[:-1], self.matrix.shape[1])
        [y], _ = get_ops(x.device).multiply(flat, [self._product])
        return y.view(*x.shape[:-1], -1).to(x.dtype)


class SharedLinear:
    """A map of which this process has a part, or reads a part; `linear` computes it.

    gather: returns all of what it reads, (…, k), of this process's own columns, see `Ranks.gather`;
    total: returns the result of all processes, fp32, of this process's own; added: returns the next
    hidden states, see `Ranks.added`; boxes: through which kernels add them up; or None. columns:
    returns all columns of the result, fp32, of this process's own.
    """

    gather: Callable[..., torch.Tensor] | None = None
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    added: Callable[..., torch.Tensor] | None = None
    boxes: Boxes | None = None
    guard: Callable[[], None] | None = None  # see `Ranks`
    columns: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._exact = None
        if isinstance(linear, PackedLinear):
            self._exact = FusedLinear(matrices=(linear.matrix,), exact=True)

    @property
    def weight(self) -> torch.Tensor:
        """Delegates to `linear`."""
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Delegates to `linear`."""
        return self.linear.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        if self.gather is not None:
            return self.linear(self.gather(x))
        if self.columns is not None:
            return self.columns(self.exact(x))
        assert self.total is not None
        return self.total(self.exact(x)).to(x.dtype)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of `linear`, fp32."""
        if self._exact is None:
            return self.linear(x).float()
        flat = narrowed(x).reshape(-1, x.shape[-1])
        [y], _ = get_ops(x.device).multiply(flat, [self._exact])
        return y.view(*x.shape[:-1], -1)


def narrowed(x: torch.Tensor) -> torch.Tensor:
    """Return x as fp16, clamped to its range."""
    return x if x.dtype == torch.float16 else x.half().clamp_(-LARGEST_HALF, LARGEST_HALF)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x Wᵀ + bias, (…, n), in the dtype of x.

    An fp32 input is narrowed to fp16 for an fp16 weight; a GPU sums the products in fp32.
    """
    if x.dtype == weight.dtype:
        return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if not x.numel():  # an expert without tokens
        return x.new_empty(*x.shape[:-1], len(weight))
    flat = torch.mm(narrowed(x).flatten(0, -2), weight.t(), out_dtype=x.dtype)
    y = flat.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def is_packed(key: str, names: Container[str]) -> bool:
    """Tell whether the linear `key` is stored in EXL2 or GPTQ form among these tensor names."""
    return is_quantized(key, names) or is_gptq(key, names)


def read_part(
    tensors: TensorFiles,
    projection: ProjectionSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    any_rows: bool = False,
    gptq: GptqLabel = UNLABELLED,
) -> Part:
    """Read a projection as the files store it: EXL2, GPTQ or plain.

    Args:
        tensors: the model's files.
        projection: what to read.
        dtype: of weight and bias in memory, if they are plain.
        device: where they go.
        any_rows: accept more or fewer out-features than the projection states; more are cut.
        gptq: how GPTQ matrices are stored, as the model's files say.

    Raises:
        MissingTensor: its weight, or a bias that the config implies, is absent.
        TensorShapeError: its shape is not the one that the config implies.
    """
    key = projection.key
    if projection.has_bias and f"{key}.bias" not in tensors:
        raise MissingTensor(
            f"`{key}.bias` is missing in `{tensors.folder}` although `config.json` implies a bias"
        )
    matrix = _read_matrix(tensors, projection, gptq, device)
    if matrix is not None:
        _check_shape(projection, (matrix.shape[1], matrix.shape[0]), any_rows=any_rows)
        return Part(matrix, projection.out_features)
    weight = read_to(tensors, f"{key}.weight", device, dtype)
    _check_shape(projection, tuple(weight.shape), any_rows=any_rows)
    bias = None
    if projection.has_bias:
        stored = read_shaped(tensors, f"{key}.bias", (projection.out_features,))
        bias = moved(stored, device, dtype)
    linear = DenseLinear(weight, bias, out_features=projection.out_features)
    return Part(linear, len(linear.weight))


def made_linear(
    part: Part,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    packed: bool = False,
    orders: RowOrders | None = None,
) -> Linear:
    """Return the map of what was read.

    Args:
        part: what was read.
        dtype: of a decoded weight.
        device: where it goes.
        packed: leave quantized matrices quantized; then they compute in fp16.
        orders: of maps with the same input, which may have their rows in the same order.
    """
    stored, out_features = part
    if isinstance(stored, DenseLinear):
        return stored
    if packed:
        orders = {} if orders is None else orders
        return PackedLinear(stored, out_features=out_features, orders=orders)
    return QuantizedLinear(stored, out_features=out_features, dtype=dtype, device=device)


def other_shape(name: str, found: Sequence[int], implied: Sequence[int]) -> TensorShapeError:
    """Return the error for a tensor of another shape than the config implies."""
    return TensorShapeError(
        f"`{name}` has shape {tuple(found)}, `config.json` implies {tuple(implied)}; check that "
        "both belong to one model"
    )


def read_shaped(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read a floating-point tensor of a shape.

    Raises:
        MissingTensor: it is absent.
        TensorShapeError: it has another shape.
    """
    tensor = tensors.read_floating(name)
    if tuple(tensor.shape) != shape:
        raise other_shape(name, tensor.shape, shape)
    return tensor


def read_to(
    tensors: TensorFiles, name: str, device: torch.device | str, dtype: torch.dtype
) -> torch.Tensor:
    """Read a floating-point tensor, in its dtype through pinned memory alone; see `moved`."""
    if tensors.dtype(name) == dtype:
        return tensors.read(name, device)
    return moved(tensors.read_floating(name), device, dtype)


def moved(tensor: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on a device, sent in its own dtype and converted there."""
    if torch.device(device).type == "cpu":
        return tensor.to(device, dtype)
    target = torch.empty(tensor.shape, dtype=dtype, device=device)
    rows = max(1, SENT_ELEMENTS * len(tensor) // tensor.numel())
    for part, source in zip(torch.split(target, rows), torch.split(tensor, rows), strict=True):
        part.copy_(send_async(source, device))
    return target


def _read_matrix(
    tensors: TensorFiles, projection: ProjectionSpec, label: GptqLabel, device: torch.device | str
) -> StoredMatrix | None:
    """Read a quantized matrix, its large tensors onto the device; None if it is not quantized."""
    key = projection.key

    def read(names: Iterable[str], on_host: Container[str]) -> dict[str, torch.Tensor]:
        bias = [f"{key}.bias"] if projection.has_bias else []
        with passing(torch.device(device)) as found:
            for name in (*names, *bias):
                if name in tensors:
                    found[name] = tensors.read(name, "cpu" if name in on_host else device)
        return found

    if is_quantized(key, tensors):
        return QuantizedMatrix.from_tensors(key, read(tensor_names(key), host_names(key)))
    if not is_gptq(key, tensors):
        return None
    bias = f"{key}.bias"  # some programs write zeros where there is none
    if not projection.has_bias and bias in tensors and tensors.read(bias).any():
        raise TensorShapeError(
            f"`{bias}` is not zero, `config.json` implies none; check that both belong to one model"
        )
    stored = read(gptq_names(key), gptq_host_names(key))
    return GptqMatrix.from_tensors(key, stored, zero_offset=zero_offset(key, stored, label))


def _check_shape(projection: ProjectionSpec, shape: tuple[int, ...], *, any_rows: bool) -> None:
    """Compare a stored (n, k) with the config; rows may have the padding of the format."""
    n, k = projection.out_features, projection.in_features
    is_known = shape in ((n, k), (padded_columns(n), k))
    if not is_known and not (any_rows and shape[1:] == (k,)):
        raise other_shape(projection.key, shape, (n, k))
