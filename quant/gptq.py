"""Act-order error feedback over many matrices that share a Hessian.

The matrices lie side by side as columns of one problem, each with its own groups. The only Python
loop over rows is the one inside a panel (`Ops.round_panel`); everything else is a GEMM or
vectorized over columns (`docs/format.md` section 4).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from exl2flow.core.config import ScaleSearch
from exl2flow.core.errors import TensorShapeError
from exl2flow.kernels import Group, get_ops
from exl2flow.model import Linear
from exl2flow.model.exl2 import ROW_MULTIPLE, QuantizedMatrix, QuantParams, padded_columns
from exl2flow.quant.hessian import HessianFactor

PANEL_ROWS = ROW_MULTIPLE  # every group begins at a multiple of it
BATCH_ELEMENTS = 1 << 26  # weights rounded side by side; bounds the working memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedMatrix:
    """A coded matrix before packing.

    codes: uint8 (k, n) in act-order; scale_codes: uint8 (g, n); max_scales: fp16 (g,);
    perm: int64 (k,).
    """

    codes: torch.Tensor
    groups: tuple[Group, ...]
    scale_codes: torch.Tensor
    max_scales: torch.Tensor
    perm: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the matrix fp16 (k, n) in the order of the in-features."""
        ops = get_ops(self.codes.device)
        scales = ops.decode_scales(self.scale_codes, self.max_scales)
        matrix = torch.empty(self.codes.shape, dtype=torch.float16, device=self.codes.device)
        matrix[self.perm] = ops.decode(self.codes, scales, self.groups)
        return matrix

    def pack(self, bias: torch.Tensor | None) -> QuantizedMatrix:
        """Return the matrix as it is stored."""
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

    output: fp32 (blocks, b, b), the metric of errors in one row; None: columns are independent.
    """

    weight: torch.Tensor
    params: QuantParams
    output: torch.Tensor | None = None


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """Add zeros at the end of the last axis, out-features, up to the stored width."""
    missing = padded_columns(tensor.shape[-1]) - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing))


def padded_weight(linear: Linear) -> torch.Tensor:
    """Return a projection's matrix fp32 (k, n) with zero columns up to the stored width."""
    return padded(linear.weight.T.float()).contiguous()


def round_matrices(
    jobs: Sequence[RoundingJob], factor: HessianFactor, *, search: ScaleSearch
) -> Iterator[RoundedMatrix]:
    """Round matrices that share a Hessian, as many at a time as fit into `BATCH_ELEMENTS`.

    Each result is independent of its company.

    Args:
        jobs: what to round.
        factor: of the Hessian.
        search: how scales are chosen.

    Raises:
        TensorShapeError: the number of rows is not a multiple of 32.
    """
    k = len(factor.perm)
    if k % ROW_MULTIPLE:
        raise TensorShapeError(f"{k} in-features are not a multiple of {ROW_MULTIPLE}")
    batch: list[RoundingJob] = []
    for job in jobs:
        elements = sum(j.weight.numel() for j in [*batch, job])
        coupled = job.output is not None or (batch and batch[-1].output is not None)
        if batch and (coupled or elements > BATCH_ELEMENTS):
            yield from _Batch(batch, factor, search).round()
            batch = []
        batch.append(job)
    if batch:
        yield from _Batch(batch, factor, search).round()


class _Batch:
    """The columns of several jobs side by side, and the state of their rounding."""

    def __init__(
        self, jobs: Sequence[RoundingJob], factor: HessianFactor, search: ScaleSearch
    ) -> None:
        self.factor = factor
        self.search = search
        self.output = jobs[0].output
        self.ops = get_ops(factor.upper.device)
        self.rows = torch.cat([job.weight for job in jobs], dim=1)[factor.perm]  # (k, m)
        k, m = self.rows.shape
        device = self.rows.device
        self.codes = torch.empty(k, m, dtype=torch.uint8, device=device)
        self.scales = torch.empty(m, dtype=torch.float32, device=device)
        self.half_range = torch.empty(m, dtype=torch.float32, device=device)
        self.groups = [job.params.groups(k) for job in jobs]
        self.columns: list[slice] = []
        for job in jobs:
            begin = self.columns[-1].stop if self.columns else 0
            self.columns.append(slice(begin, begin + job.weight.shape[1]))
        counts = [len(groups) for groups in self.groups]
        widths = [s.stop - s.start for s in self.columns]
        self.scale_codes = [
            torch.empty(g, n, dtype=torch.uint8, device=device)
            for g, n in zip(counts, widths, strict=True)
        ]
        self.max_scales = [torch.empty(g, dtype=torch.float16, device=device) for g in counts]

    def round(self) -> list[RoundedMatrix]:
        """Round panel after panel, feeding each panel's errors to all rows below it."""
        upper = self.factor.upper
        for begin in range(0, len(self.rows), PANEL_ROWS):
            end = begin + PANEL_ROWS
            self._begin_groups(begin)
            self.codes[begin:end], errors = self.ops.round_panel(
                self.rows[begin:end],
                upper[begin:end, begin:end],
                self.scales,
                self.half_range,
                self.output,
            )
            self.rows[end:].addmm_(upper[begin:end, end:].T, errors, alpha=-1)
        return [
            RoundedMatrix(
                codes=self.codes[:, self.columns[j]].contiguous(),
                groups=self.groups[j],
                scale_codes=self.scale_codes[j],
                max_scales=self.max_scales[j],
                perm=self.factor.perm,
            )
            for j in range(len(self.groups))
        ]

    def _begin_groups(self, row: int) -> None:
        """Search the scales of all groups that begin at a row, alike ones together."""
        alike: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for j, groups in enumerate(self.groups):
            for index, group in enumerate(groups):
                if group.start == row:
                    width = self.columns[j].stop - self.columns[j].start
                    alike[group.bits, group.rows, width].append((j, index))
        for (bits, rows, _), members in alike.items():
            x = torch.stack([self.rows[row : row + rows, self.columns[j]] for j, _ in members])
            if self.search == "grid":
                codes, maxima = self.ops.search_grid(x, bits)
            else:
                diagonal = self.factor.upper.diagonal()[row : row + rows]
                codes, maxima = self.ops.search_columns(x, bits, diagonal.reciprocal().square())
            scales = self.ops.decode_scales(codes, maxima).float()
            for place, (j, index) in enumerate(members):
                self.scale_codes[j][index] = codes[place]
                self.max_scales[j][index] = maxima[place]
                self.scales[self.columns[j]] = scales[place]
                self.half_range[self.columns[j]] = 2.0 ** (bits - 1)
