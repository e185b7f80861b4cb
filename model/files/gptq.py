"""GPTQ checkpoints, which run unconverted: 4-bit codes, a zero and a scale per group and column.

The only file that spells their tensor names (`docs/format.md` section 9).
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch

from exl2flow.core.errors import MissingTensor, SourceModelError, TensorShapeError
from exl2flow.kernels import PANEL_ROWS, Group, PackedMatrix, get_ops, pack_zeros, whole_tiles
from exl2flow.model.config.gptq_label import GptqLabel
from exl2flow.model.files.exl2 import column_parts

BITS = 4
PER_WORD = 32 // BITS  # codes or zeros in a word
SYMMETRIC = 1 << (BITS - 1)  # the zero of every group and column of a symmetric matrix
OFFSETS = {None: 1, "gptq": 1, "gptq_v2": 0}  # `checkpoint_format` → what stored zeros lack
SUFFIXES = ("qweight", "qzeros", "scales")  # and perhaps g_idx


def is_gptq(key: str, names: Container[str]) -> bool:
    """Tell whether the linear `key` is stored in GPTQ form among these tensor names."""
    return f"{key}.{SUFFIXES[0]}" in names


def gptq_names(key: str) -> tuple[str, ...]:
    """Return the names that a linear in GPTQ form may have, its optional bias not among them."""
    return tuple(f"{key}.{suffix}" for suffix in (*SUFFIXES, "g_idx"))


def gptq_host_names(key: str) -> tuple[str, ...]:
    """Return the names of the tensors that stay in main memory: the group of each row."""
    return (f"{key}.g_idx",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqMatrix:
    """The tensors of one linear.

    packed: int32 (k / 8, n); zeros: int32 (g, n / 8), `zero_offset` too small; scales: fp16 (g, n);
    group_of: int64 (k,), each in-feature's group; bias: (n,) or None.
    """

    packed: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor
    zero_offset: int
    bias: torch.Tensor | None = None

    @classmethod
    def from_tensors(
        cls, key: str, tensors: Mapping[str, torch.Tensor], *, zero_offset: int
    ) -> Self:
        """Take the matrix `key` out of tensors by name.

        Args:
            key: of the linear.
            tensors: by name.
            zero_offset: added to stored zeros, see the function of this name.

        Raises:
            MissingTensor: one of its tensors is absent.
            TensorShapeError: it is not of 4 bits, or its tensors contradict one another.
        """
        for suffix in SUFFIXES:
            if f"{key}.{suffix}" not in tensors:
                raise MissingTensor(f"`{key}.{suffix}` is missing although `{key}` is quantized")
        packed, zeros, scales = (tensors[f"{key}.{suffix}"] for suffix in SUFFIXES)
        if not _is_matrix(packed, zeros, scales):
            shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (packed, zeros, scales))
            raise TensorShapeError(
                f"`{key}` has qweight, qzeros and scales of {shapes}, which are no GPTQ matrix of "
                f"{BITS} bits; other widths, AWQ and Marlin cannot run"
            )
        k, groups, bias = len(packed) * PER_WORD, len(scales), tensors.get(f"{key}.bias")
        if bias is not None and not (bias.is_floating_point() and bias.shape == scales.shape[1:]):
            raise TensorShapeError(
                f"`{key}.bias` is {bias.dtype} of shape {tuple(bias.shape)}, not a number for each "
                f"of {scales.shape[1]} columns; fetch the model again"
            )
        return cls(
            packed=packed,
            zeros=zeros,
            scales=scales.half(),
            group_of=_group_of(key, k, groups, tensors.get(f"{key}.g_idx")),
            zero_offset=zero_offset,
            bias=bias,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """In-features and out-features."""
        return len(self.group_of), self.packed.shape[1]

    @property
    def whole_zeros(self) -> torch.Tensor:
        """The zeros of groups and columns, fp16 (g, n)."""
        stored = get_ops(self.zeros.device).unpack_scales(self.zeros)
        return (stored + self.zero_offset).half()

    def codes(self, columns: slice = slice(None)) -> torch.Tensor:
        """Return codes uint8 (k, c), in the order of the in-features."""
        whole = (Group(bits=BITS, start=0, rows=len(self.group_of)),)
        return get_ops(self.packed.device).unpack(self.packed[:, columns].contiguous(), whole)

    def parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of columns and their values fp16 (k, c): (code - zero) · scale."""
        zeros = self.whole_zeros
        for columns in column_parts(*self.shape):
            codes = self.codes(columns).half()
            codes -= zeros[:, columns][self.group_of]
            yield columns, codes * self.scales[:, columns][self.group_of]

    @property
    def order(self) -> torch.Tensor:
        """The in-features sorted by group, int64 (k,)."""
        return torch.argsort(self.group_of, stable=True)

    def laid_out(self, order: torch.Tensor) -> PackedMatrix:
        """Return the matrix in the layout of the inference kernels, with `order` on its device."""
        rows = torch.bincount(self.group_of).tolist()
        groups = tuple(
            Group(bits=BITS, start=stop - count, rows=count)
            for count, stop in zip(rows, accumulate(rows), strict=True)
        )
        scales = pack_zeros(whole_tiles(self.scales), whole_tiles(self.whole_zeros))
        return PackedMatrix(
            words=get_ops(self.packed.device).lay_out(self.packed, groups, scales, order),
            groups=groups,
            order=order,
            columns=self.shape[1],
            has_zeros=True,
        )


def zero_offset(key: str, tensors: Mapping[str, torch.Tensor], label: GptqLabel) -> int:
    """Return what to add to the stored zeros of a matrix: as its format says, or as they show.

    A symmetric matrix has the zero `SYMMETRIC`, whichever of the two ways its program stored it.

    Raises:
        SourceModelError: the format is unknown, or the tensors contradict what the config says.
    """
    if label.checkpoint_format not in OFFSETS:
        raise SourceModelError(
            f"`checkpoint_format` of `{key}` is `{label.checkpoint_format}`, which is not "
            "supported; supported are `gptq` and `gptq_v2`: use an unquantized model"
        )
    zeros, index = tensors.get(f"{key}.qzeros"), tensors.get(f"{key}.g_idx")
    has_groups = zeros is not None and zeros.dim() == 2 and len(zeros) > 1
    if label.is_act_ordered and has_groups and (index is None or not index.any()):
        raise SourceModelError(
            f"`desc_act` is true in the config, but no `{key}.g_idx` says which in-features form "
            "a group; fetch the model again, or correct `desc_act` if its groups follow each other"
        )
    offset = OFFSETS[label.checkpoint_format]
    if label.is_symmetric is False or zeros is None or zeros.dtype != torch.int32:
        return offset
    shown = [way for way in OFFSETS.values() if (zeros == _words_of(SYMMETRIC - way)).all()]
    if label.is_symmetric and not shown:
        raise SourceModelError(
            f"`sym` is true in the config, but `{key}.qzeros` holds other zeros than {SYMMETRIC}; "
            "fetch the model again, or correct `sym` if it was quantized with zeros of its own"
        )
    return shown[0] if shown else offset


def _words_of(code: int) -> int:
    """Return a word that holds a code in each of its places, signed."""
    return int.from_bytes(bytes([code << BITS | code] * 4), "little", signed=True)


def _is_matrix(packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> bool:
    """Tell whether three tensors have the dtypes and the shapes of one matrix."""
    are_words = packed.dtype == zeros.dtype == torch.int32 and scales.is_floating_point()
    if not are_words or packed.dim() != 2 or scales.dim() != 2 or not scales.numel():
        return False
    (groups, n), (words, columns) = scales.shape, packed.shape
    return words > 0 and n == columns and zeros.shape == (groups, n / PER_WORD)


def _group_of(key: str, k: int, groups: int, index: torch.Tensor | None) -> torch.Tensor:
    """Return the group of each in-feature, int64 (k,); consecutive rows without act-order."""
    if k % PANEL_ROWS:
        raise TensorShapeError(
            f"`{key}` has {k} in-features; GPTQ matrices can run whose in-features are a multiple "
            f"of {PANEL_ROWS}: use an unquantized model"
        )
    size = 1 << max(0, -(-k // groups) - 1).bit_length()  # the least power of two that suffices
    in_order = torch.arange(k) // size
    if size % PANEL_ROWS or int(in_order[-1]) != groups - 1:
        raise TensorShapeError(
            f"`{key}` has {groups} groups for {k} in-features; groups of a power of two from "
            f"{PANEL_ROWS} on can run"
        )
    if index is None or not index.any():
        return in_order
    group_of = index.long()
    is_inside = group_of.shape == (k,) and group_of.min() >= 0 and group_of.max() < groups
    if not (is_inside and torch.equal(torch.bincount(group_of), torch.bincount(in_order))):
        raise TensorShapeError(
            f"`{key}.g_idx` does not divide {k} in-features into {groups} groups of {size}; fetch "
            "the model again"
        )
    return group_of
