"""Act-order error feedback over many matrices that share a Hessian.

The matrices lie side by side as columns of one problem, each with its own groups. The only Python
loop over rows is the one inside a panel (`Ops.round_panel`); everything else is a GEMM or
vectorized over columns (`docs/format.md` section 4).
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import ClassVar, Self

import torch

from exl2flow.core.errors import TensorShapeError
from exl2flow.core.options.config import ScaleSearch
from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.memory import free_memory
from exl2flow.kernels import PANEL_ROWS, Group, Scales, by_factor, device_table, get_ops
from exl2flow.model import Linear
from exl2flow.model.files.exl2 import QuantizedMatrix, QuantParams, column_parts, padded_columns
from exl2flow.model.files.group_table import ROW_MULTIPLE
from exl2flow.quant.rounding.hessian import HessianFactor
from exl2flow.quant.walk.pinned import Tall

log = logging.getLogger(__name__)

BATCH_ELEMENTS = 1 << 26  # weights side by side on a CPU
GPU_BATCH_ELEMENTS = 1 << 29
BATCH_SHARE = 0.25  # of a GPU's free memory, because there may be two batches
BATCH_WEIGHT = 13  # bytes per weight rounded side by side: joined, reordered, codes, scale search
BATCH_BYTES = 8  # per weight: its row's value, codes and a copy of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedMatrix:
    """A coded matrix before packing.

    codes: uint8 (k, n) in act-order; scale_codes: uint8 (g, n); max_scales: fp16 (g,);
    perm: int64 (k,). fed_back: `U⁻ᵀ (W - Q)`, (k, n) in act-order, if requested.
    """

    FIELDS: ClassVar = ("codes", "scale_codes", "max_scales", "perm")  # tensors of the matrix

    codes: torch.Tensor
    groups: tuple[Group, ...]
    scale_codes: torch.Tensor
    max_scales: torch.Tensor
    perm: torch.Tensor
    fed_back: Tall | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of `FIELDS`."""
        return {field: getattr(self, field) for field in self.FIELDS}

    @classmethod
    def from_tensors(cls, groups: tuple[Group, ...], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the matrix whose `tensors` these are."""
        codes, scale_codes, max_scales, perm = (tensors[field] for field in cls.FIELDS)
        return cls(
            codes=codes, groups=groups, scale_codes=scale_codes, max_scales=max_scales, perm=perm
        )

    @classmethod
    def of(cls, matrix: QuantizedMatrix, device: torch.device) -> Self:
        """Return a stored matrix as codes, on a device."""
        ops, groups = get_ops(device), matrix.groups
        return cls(
            codes=ops.unpack(matrix.packed.to(device), groups),
            groups=groups,
            scale_codes=ops.unpack_scales(matrix.scale_codes.to(device)),
            max_scales=matrix.max_scales.to(device),
            perm=torch.argsort(matrix.inverse_perm.to(device).long()),
        )

    def dequantize(self) -> torch.Tensor:
        """Return the matrix fp16 (k, n) in the order of the in-features."""
        ops = get_ops(self.codes.device)
        scales = ops.decode_scales(self.scale_codes, self.max_scales)
        matrix = torch.empty(self.codes.shape, dtype=torch.float16, device=self.codes.device)
        for columns in column_parts(*self.codes.shape):
            part = ops.decode(self.codes[:, columns], scales[:, columns], self.groups)
            matrix[:, columns][self.perm] = part
        return matrix

    def pack(self, bias: torch.Tensor | None) -> QuantizedMatrix:
        """Return the matrix in its stored form."""
        return QuantizedMatrix.encode(
            codes=self.codes,
            groups=self.groups,
            scale_codes=self.scale_codes,
            max_scales=self.max_scales,
            perm=self.perm,
            bias=bias,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingJob:
    """One matrix to round: weight fp32 (k, n) in the order of the in-features, n padded.

    It is in main memory if too large for the device.

    output: fp32 (blocks, b, b), the metric of errors in one row; None: columns are independent.
    """

    weight: torch.Tensor
    params: QuantParams
    output: torch.Tensor | None = None


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Pad the last axis, the out-features, with zeros to the stored width."""
    missing = padded_columns(tensor.shape[-1]) - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def padded_weight(linear: Linear) -> torch.Tensor:
    """Return a projection's matrix fp32 (k, n) with zero columns up to the stored width.

    It is in main memory if too large for the device (`Tall`).
    """
    weight = linear.weight.T
    k, n = weight.shape
    matrix = Tall.empty(k, padded_columns(n), weight.device)
    for rows, part in matrix.parts():
        part[:, :n] = weight[rows]
        part[:, n:] = 0
    if not matrix.is_resident and weight.is_cuda:
        torch.cuda.synchronize(weight.device)  # the processor reads it
    return matrix.values


def near(weight: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Return `padded_weight` on the device of the weights, in their dtype if it is tall."""
    return weight if weight.device == linear.weight.device else padded(linear.weight.T)


def rows_of(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a matrix, on the device of the index."""
    return weight[index.to(weight.device)].to(index.device)


def alike(jobs: Sequence[RoundingJob]) -> Iterator[list[RoundingJob]]:
    """Divide jobs into runs that fit side by side: the same shape and block size."""

    def shape(job: RoundingJob) -> tuple[torch.Size, torch.Size | None]:
        return job.weight.shape, None if job.output is None else job.output.shape

    for _, run in groupby(jobs, key=shape):
        yield list(run)


def round_matrices(
    jobs: Sequence[RoundingJob],
    factor: HessianFactor,
    *,
    search: ScaleSearch,
    keep_fed_back: bool = False,
) -> Iterator[RoundedMatrix]:
    """Round matrices that share a Hessian, as many at a time as `batch_elements` allows.

    If memory runs out, fewer are rounded at a time. Each result is independent of the others.

    Args:
        jobs: the matrices to round.
        factor: of the Hessian.
        search: how scales are chosen.
        keep_fed_back: whether to return `fed_back`.

    Raises:
        TensorShapeError: the number of rows is not a multiple of 32.
    """
    _check_rows(factor)
    for run in alike(jobs):
        count = max(1, batch_elements(factor.perm.device) // run[0].weight.numel())
        count = -(-len(run) // -(-len(run) // count))  # equal batches
        while run:
            try:
                matrices = _Batch(run[:count], [factor], search, keep_fed_back).rounded()
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                count = count // 2
                log.warning("projections at a time=%d remedy=out of memory", count)
                torch.cuda.empty_cache()
                continue
            while matrices:  # keep no reference: a head's takes as much memory as everything else
                yield matrices.pop(0)
            run = run[count:]


def round_together(
    jobs: Sequence[RoundingJob], factors: Sequence[HessianFactor], *, search: ScaleSearch
) -> list[RoundedMatrix]:
    """Round matrices of several Hessians side by side, all of them at once.

    Args:
        jobs: of one shape and block size; those of each factor together, equally many.
        factors: of the Hessians.
        search: how scales are chosen.

    Raises:
        TensorShapeError: the number of rows is not a multiple of 32.
    """
    _check_rows(factors[0])
    return _Batch(jobs, factors, search, keep_fed_back=False).rounded()


def rounded_values(
    jobs: Sequence[RoundingJob], factors: Sequence[HessianFactor], *, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what matrices side by side would decode to, and their `fed_back`; no codes.

    Args:
        jobs: as for `round_together`.
        factors: likewise.
        search: likewise.

    Returns:
        fp16 and fp32 (k, j, n), rows in the act-order of each factor; `fed_back` is in main memory
        if it is too large for the device.
    """
    _check_rows(factors[0])
    batch = _Batch(jobs, factors, search, keep_fed_back=True)
    values = torch.empty(batch.codes.shape, dtype=torch.float16, device=batch.codes.device)
    batch.round(values)
    shape = (len(values), *batch.shape)
    return values.view(shape), batch.rows.values.view(shape)


def add_product(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, sign: int = 1) -> None:
    """Add `left @ right` to x (r, m), in place; right (p, m).

    left: (r, p), or (f, r, p) by the columns' factors.
    """
    if left.ndim == 2:
        x.addmm_(left, right, alpha=sign)
    else:
        f = len(left)
        by_factor(x, f).baddbmm_(left, by_factor(right, f), alpha=sign)


def _check_rows(factor: HessianFactor) -> None:
    k = len(factor.perm)
    if k % ROW_MULTIPLE:
        raise TensorShapeError(f"{k} in-features are not a multiple of {ROW_MULTIPLE}")


def batch_elements(device: torch.device) -> int:
    """Return how many weights to round side by side, to bound memory."""
    if device.type == "cpu":
        return BATCH_ELEMENTS
    return gpu_batch_elements(free_memory(device))


def gpu_batch_elements(free: int) -> int:
    """Return how many weights to round side by side on a GPU with `free` bytes free."""
    return min(GPU_BATCH_ELEMENTS, int(free * BATCH_SHARE) // BATCH_BYTES)


class _Batch:
    """Jobs of one shape side by side as columns, and the state of their rounding.

    upper: of the factor, fp32 (k, k), or (f, k, k) if there are several, equally many jobs of each.
    """

    def __init__(
        self,
        jobs: Sequence[RoundingJob],
        factors: Sequence[HessianFactor],
        search: ScaleSearch,
        keep_fed_back: bool,
    ) -> None:
        perms = [factor.perm for factor in factors]
        self.perms = [perm for perm in perms for _ in range(len(jobs) // len(factors))]
        self.upper = stacked([factor.upper for factor in factors])
        self.search = search
        self.output = side_by_side([job.output for job in jobs])
        self.ops = get_ops(self.upper.device)
        k, n = jobs[0].weight.shape
        m = n * len(jobs)
        self.shape = len(jobs), n
        self.groups = [job.params.groups(k) for job in jobs]
        self.starts = group_starts(self.groups)
        self.longest = max(group.rows for groups in self.groups for group in groups)
        new = partial(torch.empty, device=self.upper.device)
        self.rows = Tall.empty(k, m, self.upper.device)  # errors, once rounded
        for rows, part in self.rows.parts():
            j = 0
            for _, run in groupby(jobs, key=lambda job: id(job.weight)):
                count = len(list(run))  # the same matrix several times
                own = rows_of(jobs[j].weight, self.perms[j][rows])
                part.view(-1, *self.shape)[:, j : j + count] = own[:, None]
                j += count
        self.row_weights = self.upper.diagonal(dim1=-2, dim2=-1).reciprocal().square()
        self.codes = new(k, m, dtype=torch.uint8)
        self.scales = new(m)
        self.half_range = new(m)
        panels = k // PANEL_ROWS  # a group is identified by its first panel
        self.scale_codes = new(panels, *self.shape, dtype=torch.uint8)
        self.max_scales = new(panels, len(jobs), dtype=torch.float16)
        self.keep_fed_back = keep_fed_back

    def rounded(self) -> list[RoundedMatrix]:
        """Round, and return the matrices."""
        self.round()
        return [self._result(j) for j in range(len(self.groups))]

    def round(self, values: torch.Tensor | None = None) -> None:
        """Round one panel after another, feeding each panel's errors to all rows below it.

        Args:
            values: fp16 (k, m), overwritten with what codes decode to.
        """
        for top, bottom in self.rows.windows():
            upper = self.upper[..., top:bottom, :]
            window = self.rows.read(
                top, bottom + self.longest - PANEL_ROWS
            )  # groups may extend further
            rows = window[: bottom - top]
            for begin in range(0, len(rows), PANEL_ROWS):
                look()
                end = begin + PANEL_ROWS
                panel = slice(top + begin, top + end)
                self._begin_groups(top + begin, window[begin:])
                self.codes[panel], errors = self.ops.round_panel(
                    rows[begin:end],
                    upper[..., begin:end, panel],
                    self.scales,
                    self.half_range,
                    self.output,
                )
                below = upper[..., begin:end, panel.stop : bottom]
                add_product(rows[end:], below.mT, errors, sign=-1)
                rows[begin:end] = errors
                if values is not None:
                    steps = self.codes[panel] - self.half_range
                    torch.mul(steps, self.scales, out=steps)
                    values[panel] = steps
            self.rows.write(top, rows)
            for others, part in self.rows.parts(bottom):
                add_product(part, upper[..., others].mT, rows, sign=-1)

    def _result(self, j: int) -> RoundedMatrix:
        columns = slice(j * self.shape[1], (j + 1) * self.shape[1])
        begun = first_panels(self.groups[j], self.codes.device)
        return RoundedMatrix(
            codes=self.codes[:, columns].contiguous(),
            groups=self.groups[j],
            scale_codes=self.scale_codes[begun, j],
            max_scales=self.max_scales[begun, j],
            perm=self.perms[j],
            fed_back=self.rows.columns(columns) if self.keep_fed_back else None,
        )

    def _begin_groups(self, row: int, rows: torch.Tensor) -> None:
        """Search the scales of all groups that begin at a row; `rows` fp32 (…, m) from there on."""
        members = self.starts.get(row)
        if not members:
            return
        panel = row // PANEL_ROWS
        longest = max(group.rows for group in members.values())
        scales = Scales(
            codes=self.scale_codes[panel : panel + 1],
            maxima=self.max_scales[panel : panel + 1],
            decoded=self.scales.view(1, *self.shape),
        )
        weights = None if self.search == "grid" else self.row_weights[..., row : row + longest]
        self.ops.begin_groups(rows[:longest], members, scales, self.half_range, weights)


def group_starts(matrices: Sequence[Sequence[Group]]) -> dict[int, dict[int, Group]]:
    """Return row → index of each matrix with a group that begins there → the group."""
    starts: dict[int, dict[int, Group]] = defaultdict(dict)
    for j, groups in enumerate(matrices):
        for group in groups:
            starts[group.start][j] = group
    return starts


def first_panels(groups: Sequence[Group], device: torch.device) -> torch.Tensor:
    """Return the first panel of each group, int64 (g,)."""
    return device_table(tuple(group.start // PANEL_ROWS for group in groups), device)


def stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return matrices (k, k) as (f, k, k), a single one as it is."""
    return matrices[0] if len(matrices) == 1 else torch.stack(list(matrices))


def side_by_side(outputs: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Concatenate the blocks (blocks, b, b) of several matrices; all have blocks, or none has."""
    blocks = [output for output in outputs if output is not None]
    return torch.cat(blocks) if blocks else None
