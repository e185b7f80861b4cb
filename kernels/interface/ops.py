"""The `Ops` interface: every operation that quantization and inference need from a device."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from exl2flow.kernels.interface.cache_ops import CacheOps
from exl2flow.kernels.interface.groups import Group
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.interface.packed import FusedLinear, PackedMatrix
from exl2flow.kernels.interface.sampler_ops import SamplerOps
from exl2flow.kernels.streams import kept, sent

MOST_COLUMNS = 1024  # per block of the output factor; torch waits for the GPU on wider ones
CHUNK_ELEMENTS = 1 << 26  # of a wide matrix that are processed together
MOST_BESIDE = 192 << 20  # bytes of matrices that are decoded and multiplied together
FEW_ROWS = 32  # most rows for which a product reads the codes of a packed matrix directly


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Scales of `j` matrices of n columns, by row panel.

    codes: uint8 (panels, j, n); maxima: fp16 (panels, j); both stored at the first panel of a
    group. decoded: fp32 (panels, j, n), the decoder's, at every panel of a group.
    """

    codes: torch.Tensor
    maxima: torch.Tensor
    decoded: torch.Tensor

    def of(self, panels: slice) -> "Scales":
        """Return views of the given panels."""
        return Scales(
            codes=self.codes[panels], maxima=self.maxima[panels], decoded=self.decoded[panels]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunGroups:
    """The groups of `j` matrices that begin at one row, as tensors on a device.

    longest: rows of the longest, r below. rows: int64 (j,); 0 for a matrix without one there.
    inside: fp32 (r, j, 1), 1 for rows inside a group; None: all are.
    """

    longest: int
    rows: torch.Tensor
    inside: torch.Tensor | None

    @classmethod
    def of(cls, groups: Sequence[Group | None], device: torch.device) -> "BegunGroups":
        """Describe the group of each matrix, or None."""
        rows = tuple(group.rows if group else 0 for group in groups)
        longest = max(rows)
        inside = None if min(rows) == longest else _inside(rows, device)
        return cls(longest=longest, rows=device_table(rows, device), inside=inside)

    def only(self, x: torch.Tensor) -> torch.Tensor:
        """Return x fp32 (r, m) with zeros outside the groups."""
        if self.inside is None:
            return x
        return (x.view(len(x), len(self.rows), -1) * self.inside).view(x.shape)


class Ops(CacheOps, SamplerOps, Protocol):
    """Tensor operations of the format; all tensors of a call lie on one device."""

    def search_grid(
        self, x: torch.Tensor, groups: Sequence[Group]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose scale codes from column ranges, and the best maximum, for several matrices.

        Args:
            x: fp32 (j, r, n), current rows of each of `j` matrices from the start of a group.
            groups: one per matrix; rows beyond a group's own are ignored.

        Returns:
            Scale codes uint8 (j, n) from 0 to 15, and the stored maxima fp16 (j,).
        """
        ...

    def search_columns(
        self, x: torch.Tensor, groups: Sequence[Group], row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the maximum and every column's scale code by weighted squared error.

        Args:
            x: as for `search_grid`.
            groups: as for `search_grid`.
            row_weights: fp32 (r,), weight of each row's squared error.

        Returns:
            As `search_grid`.
        """
        ...

    def begin_groups(
        self,
        rows: torch.Tensor,
        members: Mapping[int, Group],
        scales: Scales,
        half_range: torch.Tensor,
        row_weights: torch.Tensor | None = None,
    ) -> None:
        """Choose the scales of the groups that begin at a row, for matrices side by side.

        Args:
            rows: fp32 (r, m), current rows from there on, r rows in the longest group.
            members: index of each matrix, of `j`, that has a group → the group.
            scales: of this one panel; overwritten for the members.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column; overwritten for the members.
            row_weights: fp32 (r,), for `search_columns`; None: use `search_grid`.
        """
        ...

    def round_panel(
        self,
        rows: torch.Tensor,
        upper: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round a panel's rows in order, and feed each row's error to the rows below it.

        Args:
            rows: fp32 (p, m), overwritten; p is at most `PANEL_ROWS`.
            upper: fp32 (p, p), the panel's diagonal block of the upper factor of H⁻¹.
            scales: fp32 (m,), decoder scale of each column.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column.
            output: fp32 (blocks, b, b) with blocks · b = m, metric in which a row's error is
                minimized; None: the columns are independent.

        Returns:
            Codes uint8 (p, m), and errors over the factor's diagonal fp32 (p, m).
        """
        ...

    def descend_panel(
        self,
        steps: torch.Tensor,
        gradient: torch.Tensor,
        hessian: torch.Tensor,
        scales: torch.Tensor,
        half_range: torch.Tensor,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Improve a panel's steps by coordinate descent on tr(O Eᵀ H E), row by row.

        Args:
            steps: fp32 (p, m), signed codes; overwritten; p is at most `PANEL_ROWS`.
            gradient: fp32 (p, m), H E O of the panel's rows; overwritten.
            hessian: fp32 (p, p), the panel's diagonal block of H.
            scales: fp32 (m,), decoder scale of each column.
            half_range: fp32 (m,), 2 ** (bits - 1) of each column.
            output: fp32 (blocks, b, b), O; None: the identity.

        Returns:
            The change of the panel's values, fp32 (p, m).
        """
        ...

    def refit_scales(
        self,
        steps: torch.Tensor,
        gradient: torch.Tensor,
        hessian: torch.Tensor,
        begun: BegunGroups,
        scales: Scales,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Move scales towards the optimum of tr(O Eᵀ H E) as long as each matrix's share falls.

        Args:
            steps: fp32 (r, m), signed codes of `j` matrices side by side, from the groups' start.
            gradient: fp32 (r, m), H E of these rows.
            hessian: fp32 (r, r), their diagonal block of H.
            begun: the groups, the longest of r rows.
            scales: of the r / 32 panels; overwritten.
            output: fp32 (blocks, b, b), O; None: the identity.

        Returns:
            The change of the rows' values, fp32 (r, m).
        """
        ...

    def pack(self, codes: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Pack codes uint8 (k, n) into words int32 (sum of rows * bits / 32, n)."""
        ...

    def unpack(self, packed: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """Invert `pack`: words int32 → codes uint8 (k, n)."""
        ...

    def pack_scales(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack 4-bit scale codes uint8 (g, n) into int32 (g, n / 8), low nibble first."""
        ...

    def unpack_scales(self, packed: torch.Tensor) -> torch.Tensor:
        """Invert `pack_scales`: int32 (g, n / 8) → codes uint8 (g, n)."""
        ...

    def decode_scales(self, codes: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
        """Return the scales fp16 (g, n) a decoder uses for codes (g, n) and maxima fp16 (g,)."""
        ...

    def decode(
        self, codes: torch.Tensor, scales: torch.Tensor, groups: Sequence[Group]
    ) -> torch.Tensor:
        """Return the matrix fp16 (k, n) for codes uint8 (k, n) and scales fp16 (g, n)."""
        ...

    def lay_out(
        self, words: torch.Tensor, groups: Sequence[Group], order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Convert a file's words to `PackedMatrix.codes`; zero columns fill the last tile.

        Args:
            words: int32 (sum of rows * bits / 32, n).
            groups: of the result, in whole panels.
            order: int64 (k,), the file's row for each row, all of 4 bits; None: unchanged.
        """
        ...

    def lay_out_scales(self, words: torch.Tensor, max_scales: torch.Tensor) -> torch.Tensor:
        """Convert codes int32 (g, n / 8) and maxima fp16 (g,) to `PackedMatrix.scales`."""
        ...

    def decode_packed(self, matrix: PackedMatrix) -> torch.Tensor:
        """Return a packed matrix as fp16 (k, columns), its rows in in-feature order."""
        ...

    def multiply(
        self,
        x: torch.Tensor,
        products: Sequence[FusedLinear],
        hidden: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return x Q + bias of packed matrices, summed in fp32; chain several products.

        Args:
            x: fp16 (rows, k).
            products: each reads the previous result; up to three matrices each, one
                result in all but the last.
            hidden: fp16 (rows, columns), results are added to it; None: zeros.

        Returns:
            The results of the last product, (rows, columns) each, fp32 if it is `exact`, else
            fp16; and the last hidden state, or the results once more if there is none.
        """
        ...

    def norm(self, x: torch.Tensor, by: NormArgs) -> torch.Tensor:
        """Normalize x (…, d), or (…, heads, t, d) with weights of heads; see `NormArgs`."""
        ...

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return activation(gate) · up, each rounded to their dtype; the activation by name."""
        ...

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """Return activation(x); the activation by name."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + d/2) of each head's first d dimensions, in fp32.

        Args:
            x: (b, h, t, head_dim).
            cos: fp32 (t, d/2) or (b, 1, t, d/2).
            sin: of the same shape. Without any columns, x is returned as it is.

        Returns:
            Rotated x, in its shape and dtype.
        """
        ...

    def joined(
        self, a: torch.Tensor, b: torch.Tensor, a_sums: torch.Tensor, b_sums: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention to two sets of positions from attention to each, and the sums.

        Args:
            a: what queries (b, h, t, head_dim) find among the first ones.
            b: among the second ones.
            a_sums: logarithms of the sums of exp(score), fp32 (b, h, t).
            b_sums: of the second ones.
        """
        ...

    def repeat(self, work: Callable[[], None], times: int) -> None:
        """Run the same work several times.

        Args:
            work: changes tensors in place; must not wait for the device or copy to it.
            times: how often.
        """
        ...

    def prepare(self) -> None:
        """Start to build the largest kernel for generation, which takes seconds, in a thread."""
        ...


_switching = threading.Lock()
_blocks: dict[object, bool] = {}  # active `tensor_cores` blocks, after the setting before them


@contextmanager
def tensor_cores(use: bool = True) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 products on a GPU: fp16 and bf16 weights lose nothing.

    The switch belongs to the process. Where blocks of several threads overlap, the one begun
    last decides, and the last to end restores the earlier setting. Stages on a GPU never overlap
    (`core.slots.turn`), so timing changes no result (`docs/concepts/gpu.md`).
    """
    block = object()
    with _switching:
        _blocks.setdefault("before", torch.backends.cuda.matmul.allow_tf32)
        _blocks[block] = use
        torch.backends.cuda.matmul.allow_tf32 = use
    try:
        yield
    finally:
        with _switching:
            del _blocks[block]
            torch.backends.cuda.matmul.allow_tf32 = list(_blocks.values())[-1]
            if len(_blocks) == 1:
                _blocks.clear()


@kept
def device_table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return integers as int64 on a device; each table is sent once.

    The result is shared: never change it.
    """
    return sent(torch.tensor(values, dtype=torch.int64), device)


@kept
def half_ranges(bits: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return 2 ** (bits - 1) as fp32 on a device; shared like a `device_table`."""
    return sent(torch.tensor([2.0 ** (width - 1) for width in bits]), device)


@kept
def _inside(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    inside = torch.arange(max(rows))[:, None] < torch.tensor(rows)
    return sent(inside.float()[:, :, None], device)
