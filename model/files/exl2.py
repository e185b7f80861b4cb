"""The EXL2 format: names, shapes and bit cost of a quantized matrix (`docs/format.md`).

The only file that spells the tensor names on disk. A matrix is stored transposed, `(k, n)`, its
rows in act-order: packed row `r` holds in-feature `argsort(inverse_perm)[r]`.
"""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from exl2flow.core.errors import ConfigError, MissingTensor, TensorShapeError
from exl2flow.kernels import CHUNK_ELEMENTS, Group, PackedMatrix, get_ops
from exl2flow.model.files.group_table import (
    BIT_WIDTHS,
    ROW_MULTIPLE,
    divides,
    first_words,
    groups_of,
)
from exl2flow.model.files.weights import TensorFiles

COLUMN_MULTIPLE = 32  # n is padded to this with zero columns
SCALE_BITS = 4
MAX_ROWS = 65535  # permutations are narrowed to unsigned 16 bits by readers
MOST_ROWS_IN_GROUP = 1 << 31  # that a file may state

_NAMES = {
    "packed": "q_weight",
    "scale_codes": "q_scale",
    "max_scales": "q_scale_max",
    "group_table": "q_groups",
    "inverse_perm": "q_invperm",
}
_DTYPES = {
    "packed": torch.int32,
    "scale_codes": torch.int32,
    "max_scales": torch.float16,
    "group_table": torch.int16,
    "inverse_perm": torch.int32,
}


def padded_columns(n: int) -> int:
    """Return the number of stored columns for `n` out-features."""
    return -(-n // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def column_parts(k: int, n: int) -> Iterator[slice]:
    """Yield the slices of columns in which a wide matrix is decoded, multiples of 32 columns."""
    step = max(1, CHUNK_ELEMENTS // k // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    for begin in range(0, n, step):
        yield slice(begin, min(begin + step, n))


def is_quantized(key: str, names: Container[str]) -> bool:
    """Tell whether the linear `key` is stored in EXL2 form among these tensor names."""
    return f"{key}.{_NAMES['packed']}" in names


def host_names(key: str) -> tuple[str, ...]:
    """Return the names of the tensors that stay in main memory: group table and permutation."""
    return tuple(f"{key}.{_NAMES[field]}" for field in ("group_table", "inverse_perm"))


def tensor_names(key: str) -> tuple[str, ...]:
    """Return the names that every quantized linear has, its optional bias not among them."""
    return tuple(f"{key}.{suffix}" for suffix in _NAMES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Consecutive rows of one bit width and group size."""

    bits: int
    group_size: int
    start: int
    rows: int

    @property
    def stop(self) -> int:
        """The row after the last one."""
        return self.start + self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantParams:
    """Division of one matrix: falling bit widths, their shares of the rows, group sizes."""

    bit_widths: tuple[int, ...]
    proportions: tuple[float, ...]
    group_sizes: tuple[int, ...]
    scale_bits: int = SCALE_BITS

    def __post_init__(self) -> None:
        if not (len(self.bit_widths) == len(self.proportions) == len(self.group_sizes) > 0):
            lists = (self.bit_widths, self.proportions, self.group_sizes)
            raise ConfigError(f"quantization parameters of unequal lengths: {lists}")
        falling = tuple(sorted(set(self.bit_widths), reverse=True))
        if self.bit_widths != falling or not set(falling) <= set(BIT_WIDTHS):
            raise ConfigError(f"bit widths must fall and be among {BIT_WIDTHS}: {self.bit_widths}")
        if sum(self.proportions) != 1.0 or min(self.proportions) < 0:
            raise ConfigError(f"proportions must sum to exactly 1: {self.proportions}")
        if any(
            not 0 < size < MOST_ROWS_IN_GROUP or size % ROW_MULTIPLE for size in self.group_sizes
        ):
            raise ConfigError(f"group sizes must be multiples of {ROW_MULTIPLE}: {self}")
        if self.scale_bits != SCALE_BITS:
            raise ConfigError(f"scale bits must be {SCALE_BITS}, found {self.scale_bits}")

    def __str__(self) -> str:
        parts = zip(self.proportions, self.bit_widths, self.group_sizes, strict=True)
        return "/".join(f"{p:g}:{b}b_{g}g" for p, b, g in parts) + f" s{self.scale_bits}"

    @classmethod
    def uniform(cls, bits: int, group_size: int) -> Self:
        """Return the parameters of a matrix of one width."""
        return cls(bit_widths=(bits,), proportions=(1.0,), group_sizes=(group_size,))

    def group_counts(self, k: int) -> tuple[int, ...]:
        """Return the number of groups of each bit width in `k` rows (format section 3)."""
        counts, left = [], k
        for share, size in zip(self.proportions, self.group_sizes, strict=True):
            counts.append(max(0, math.ceil(min(k * share, left) / size)))
            left -= counts[-1] * size
        return tuple(counts)

    def bands(self, k: int) -> tuple[Band, ...]:
        """Return the bands of a matrix with `k` rows, without empty ones."""
        bands: list[Band] = []
        row = 0
        counts = self.group_counts(k)
        for bits, size, count in zip(self.bit_widths, self.group_sizes, counts, strict=True):
            rows = min(count * size, k - row)
            if rows > 0:
                bands.append(Band(bits=bits, group_size=size, start=row, rows=rows))
                row += rows
        return tuple(bands)

    def groups(self, k: int) -> tuple[Group, ...]:
        """Return the groups of a matrix with `k` rows."""
        return tuple(
            Group(bits=band.bits, start=start, rows=min(band.group_size, band.stop - start))
            for band in self.bands(k)
            for start in range(band.start, band.stop, band.group_size)
        )

    def total_bits(self, k: int, n: int, *, has_bias: bool = False) -> int:
        """Return all stored bits of a `(k, n)` matrix, `n` already padded."""
        bits = sum(band.rows * band.bits * n for band in self.bands(k))
        bits += sum(self.group_counts(k)) * (16 + 32 + self.scale_bits * n) + 32 * k
        return bits + (16 * n if has_bias else 0)

    def to_json(self) -> dict[str, object]:
        """Return the form used in `measurement.json`."""
        sizes = zip(self.bit_widths, self.group_sizes, strict=True)
        return {
            "group_size": {str(bits): size for bits, size in sizes},
            "bits": list(self.bit_widths),
            "bits_prop": list(self.proportions),
            "scale_bits": self.scale_bits,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Read the form used in `measurement.json`.

        Raises:
            ConfigError: a field is missing or impossible.
        """
        try:
            bits = tuple(int(b) for b in value["bits"])  # type: ignore[attr-defined]  # JSON
            sizes = {int(b): int(s) for b, s in value["group_size"].items()}  # type: ignore[attr-defined]  # JSON
            return cls(
                bit_widths=bits,
                proportions=tuple(float(p) for p in value["bits_prop"]),  # type: ignore[attr-defined]  # JSON
                group_sizes=tuple(sizes[b] for b in bits),
                scale_bits=int(value.get("scale_bits", SCALE_BITS)),  # type: ignore[call-overload]  # JSON
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(f"not quantization parameters: {value} ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """The tensors of one quantized linear, as stored.

    packed: int32 (words, n); scale_codes: int32 (g, n/8); max_scales: fp16 (g,);
    group_table: int16 (2g,); inverse_perm: int32 (k,); bias: fp16 (n,) or None. `n` is padded.
    """

    packed: torch.Tensor
    scale_codes: torch.Tensor
    max_scales: torch.Tensor
    group_table: torch.Tensor
    inverse_perm: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def encode(
        cls,
        *,
        codes: torch.Tensor,
        groups: Sequence[Group],
        scale_codes: torch.Tensor,
        max_scales: torch.Tensor,
        perm: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Self:
        """Pack a coded matrix.

        Args:
            codes: uint8 (k, n) in act-order.
            groups: the groups, in row order.
            scale_codes: uint8 (g, n), 0 to 15.
            max_scales: fp16 (g,).
            perm: int64 (k,), in-feature of each packed row.
            bias: (n,) or None.

        Raises:
            TensorShapeError: more rows than readers can index.
        """
        k, _ = codes.shape
        starts = first_words(groups)
        if k > MAX_ROWS:  # others have fewer groups and words than signed 16 bits can count, too
            raise TensorShapeError(
                f"a matrix with {k} rows cannot be stored: the format has {MAX_ROWS} at most"
            )
        ops = get_ops(codes.device)
        table = [
            value for g, start in zip(groups, starts, strict=True) for value in (g.bits, start)
        ]
        return cls(
            packed=ops.pack(codes, groups),
            scale_codes=ops.pack_scales(scale_codes),
            max_scales=max_scales,
            group_table=torch.tensor(table, dtype=torch.int16),
            inverse_perm=torch.argsort(perm).to(torch.int32),
            bias=None if bias is None else bias.to(torch.float16),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (in-features) and padded columns (out-features)."""
        return self.inverse_perm.shape[0], self.packed.shape[1]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups, recovered from the group table."""
        return groups_of(tuple(self.group_table.tolist()), self.packed.shape[0])

    @property
    def order(self) -> torch.Tensor:
        """The in-feature of each packed row, int64 (k,)."""
        return _order(self.inverse_perm)

    @property
    def total_bits(self) -> int:
        """All stored bits, bias included."""
        return 8 * sum(t.numel() * t.element_size() for t in self.to_tensors("").values())

    def dequantize(self, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Return the decoded matrix, (k, n) in the order of the in-features.

        Values are exact fp16 numbers in any dtype that holds them.
        """
        matrix = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        for columns, part in self.parts():
            matrix[:, columns] = part
        return matrix

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of columns and their decoded values, fp16 (k, c)."""
        ops, groups = get_ops(self.packed.device), self.groups
        scales = ops.decode_scales(ops.unpack_scales(self.scale_codes), self.max_scales)
        place = self.inverse_perm.long()
        for columns in column_parts(*self.shape):
            codes = ops.unpack(self.packed[:, columns], groups)
            yield columns, ops.decode(codes, scales[:, columns], groups)[place]

    def laid_out(self, order: torch.Tensor) -> PackedMatrix:
        """Return the matrix in the layout of the inference kernels, with `order` on its device."""
        ops, groups = get_ops(self.packed.device), self.groups
        return PackedMatrix(
            words=ops.lay_out(
                self.packed, groups, ops.lay_out_scales(self.scale_codes, self.max_scales)
            ),
            groups=groups,
            order=order,
            columns=self.shape[1],
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the matrix on a device; the small group table stays in main memory."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(
            self,
            packed=self.packed.to(device),
            scale_codes=self.scale_codes.to(device),
            max_scales=self.max_scales.to(device),
            inverse_perm=self.inverse_perm.to(device),
            bias=bias,
        )

    def to_tensors(self, key: str) -> dict[str, torch.Tensor]:
        """Return name → tensor for a file."""
        tensors = {f"{key}.{suffix}": getattr(self, field) for field, suffix in _NAMES.items()}
        if self.bias is not None:
            tensors[f"{key}.bias"] = self.bias
        return tensors

    @classmethod
    def from_tensors(cls, key: str, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Take the matrix `key` out of tensors by name; a stored `q_perm` is ignored.

        Raises:
            MissingTensor: one of its tensors is absent.
            TensorShapeError: shapes or dtypes that contradict one another.
        """
        fields = {}
        for field, suffix in _NAMES.items():
            name = f"{key}.{suffix}"
            if name not in tensors:
                raise MissingTensor(f"`{name}` is missing although `{key}` is quantized")
            fields[field] = tensors[name]
            if fields[field].dtype != _DTYPES[field]:
                raise TensorShapeError(f"`{name}` is {fields[field].dtype}, not {_DTYPES[field]}")
        bias = f"{key}.bias"
        matrix = cls(**fields, bias=tensors.get(bias))
        _check_shapes(key, matrix)
        return matrix


def stored_rows(key: str, tensors: TensorFiles) -> tuple[tuple[Group, ...], torch.Tensor]:
    """Return the groups of a matrix in files, and the in-feature of each row, int64 (k,)."""
    table, places = (tensors.read(name) for name in host_names(key))
    words, _ = tensors.shape(f"{key}.{_NAMES['packed']}")
    return groups_of(tuple(table.tolist()), words), _order(places)


def _order(inverse_perm: torch.Tensor) -> torch.Tensor:
    places = inverse_perm.long()
    return torch.empty_like(places).scatter_(0, places, torch.arange(len(places)).to(places))


def quantized_layout(
    key: str, params: QuantParams, k: int, n: int, *, has_bias: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name → (dtype, shape) of a quantized linear to be made; `n` is padded."""
    bands = params.bands(k)
    words = sum(band.rows * band.bits for band in bands) // 32
    groups = sum(math.ceil(band.rows / band.group_size) for band in bands)
    shapes = {
        "packed": (words, n),
        "scale_codes": (groups, n // 8),
        "max_scales": (groups,),
        "group_table": (2 * groups,),
        "inverse_perm": (k,),
    }
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        f"{key}.{_NAMES[field]}": (_DTYPES[field], shape) for field, shape in shapes.items()
    }
    if has_bias:
        layout[f"{key}.bias"] = (torch.float16, (n,))
    return layout


def _check_shapes(key: str, matrix: QuantizedMatrix) -> None:
    """Compare the tensors of a matrix read from a file with each other."""
    count, rows = matrix.max_scales.numel(), matrix.inverse_perm.numel()
    agree = (
        matrix.packed.dim() == 2
        and matrix.max_scales.shape == (count,)
        and matrix.inverse_perm.shape == (rows,)
        and matrix.group_table.shape == (2 * count,)
        and matrix.scale_codes.shape == (count, matrix.packed.shape[1] / 8)
        and divides(tuple(matrix.group_table.tolist()), matrix.packed.shape[0], rows)
        and (matrix.bias is None or matrix.bias.shape == matrix.packed.shape[1:])
        and (matrix.bias is None or matrix.bias.is_floating_point())
    )
    if not agree:
        raise TensorShapeError(
            f"the EXL2 tensors of `{key}` contradict one another; fetch the model again"
        )
    if not (matrix.inverse_perm.is_meta or _is_permutation(matrix.inverse_perm)):
        raise TensorShapeError(
            f"`{key}.{_NAMES['inverse_perm']}` does not name each of {rows} rows once; fetch the "
            "model again"
        )


def _is_permutation(places: torch.Tensor) -> bool:
    if ((places < 0) | (places >= len(places))).any():
        return False
    return bool(torch.zeros(len(places)).index_fill_(0, places.long(), 1).all())
