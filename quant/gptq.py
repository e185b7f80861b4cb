"""Act-order error feedback over many matrices that share a Hessian.

The matrices lie side by side as columns of one problem, each with its own groups. The only Python
loop over rows is the one inside a panel (`Ops.round_panel`); everything else is a GEMM or
vectorized over columns (`docs/format.md` section 4).
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from exl2flow.core.config import ScaleSearch
from exl2flow.core.errors import TensorShapeError
from exl2flow.core.memory import free_memory
from exl2flow.kernels import PANEL_ROWS, Group, Scales, device_table, get_ops
from exl2flow.model import Linear
from exl2flow.model.exl2 import ROW_MULTIPLE, QuantizedMatrix, QuantParams, padded_columns
from exl2flow.quant.hessian import HessianFactor

log = logging.getLogger(__name__)

WINDOW_ROWS = 8 * PANEL_ROWS  # errors of so many rows reach all rows below in one product
BATCH_ELEMENTS = 1 << 26  # weights side by side on a CPU
GPU_BATCH_ELEMENTS = 1 << 29
BATCH_SHARE = 0.25  # of a GPU's free memory, for there may be two batches
BATCH_BYTES = 8  # of a weight: its row's value, codes and a copy of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedMatrix:
    """A coded matrix before packing.

    codes: uint8 (k, n) in act-order; scale_codes: uint8 (g, n); max_scales: fp16 (g,);
    perm: int64 (k,). fed_back: fp32 (k, n), `U⁻ᵀ (W - Q)` in act-order, where it was asked for.
    """

    codes: torch.Tensor
    groups: tuple[Group, ...]
    scale_codes: torch.Tensor
    max_scales: torch.Tensor
    perm: torch.Tensor
    fed_back: torch.Tensor | None = None

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


def alike(jobs: Sequence[RoundingJob]) -> Iterator[list[RoundingJob]]:
    """Divide jobs into runs that can lie side by side: of one shape and size of blocks."""

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

    A device that has less memory than it seemed gets fewer at a time.

    Each result is independent of its company.

    Args:
        jobs: what to round.
        factor: of the Hessian.
        search: how scales are chosen.
        keep_fed_back: whether results keep `fed_back`.

    Raises:
        TensorShapeError: the number of rows is not a multiple of 32.
    """
    k = len(factor.perm)
    if k % ROW_MULTIPLE:
        raise TensorShapeError(f"{k} in-features are not a multiple of {ROW_MULTIPLE}")
    for run in alike(jobs):
        most = max(1, batch_elements(factor.perm.device) // run[0].weight.numel())
        most = -(-len(run) // -(-len(run) // most))  # as many each time
        while run:
            try:
                found = _Batch(run[:most], factor, search, keep_fed_back).round()
            except torch.OutOfMemoryError:
                if most == 1:
                    raise
                most = most // 2
                log.warning("projections at a time=%d remedy=out of memory", most)
                torch.cuda.empty_cache()
                continue
            yield from found
            run = run[most:]


def batch_elements(device: torch.device) -> int:
    """Return how many weights are rounded side by side, to bound memory."""
    if device.type == "cpu":
        return BATCH_ELEMENTS
    return gpu_batch_elements(free_memory(device))


def gpu_batch_elements(free: int) -> int:
    """Return how many weights are rounded side by side on a GPU with so many bytes free."""
    return min(GPU_BATCH_ELEMENTS, int(free * BATCH_SHARE) // BATCH_BYTES)


class _Batch:
    """The columns of jobs that are alike side by side, and the state of their rounding."""

    def __init__(
        self,
        jobs: Sequence[RoundingJob],
        factor: HessianFactor,
        search: ScaleSearch,
        keep_fed_back: bool,
    ) -> None:
        self.factor = factor
        self.search = search
        self.output = side_by_side([job.output for job in jobs])
        self.ops = get_ops(factor.upper.device)
        k, n = jobs[0].weight.shape
        self.shape = len(jobs), n
        self.groups = [job.params.groups(k) for job in jobs]
        self.starts = group_starts(self.groups)
        device = jobs[0].weight.device
        self.rows = torch.empty(k, n * len(jobs), device=device)  # errors, once they are rounded
        for j, job in enumerate(jobs):
            self.rows.view(k, *self.shape)[:, j] = job.weight[factor.perm]
        self.row_weights = factor.upper.diagonal().reciprocal().square()
        self.codes = torch.empty_like(self.rows, dtype=torch.uint8)
        self.scales = torch.empty_like(self.rows[0])
        self.half_range = torch.empty_like(self.scales)
        panels = k // PANEL_ROWS  # groups are told apart by the panel that they begin with
        self.scale_codes = torch.empty_like(self.codes[:panels]).view(panels, *self.shape)
        self.max_scales = torch.empty(
            panels, len(jobs), dtype=torch.float16, device=self.rows.device
        )
        self.keep_fed_back = keep_fed_back

    def round(self) -> list[RoundedMatrix]:
        """Round panel after panel, feeding each panel's errors to all rows below it."""
        upper, k = self.factor.upper, len(self.rows)
        for top in range(0, k, WINDOW_ROWS):
            bottom = min(top + WINDOW_ROWS, k)
            for begin in range(top, bottom, PANEL_ROWS):
                panel, below = slice(begin, begin + PANEL_ROWS), slice(begin + PANEL_ROWS, bottom)
                self._begin_groups(begin)
                self.codes[panel], found = self.ops.round_panel(
                    self.rows[panel],
                    upper[panel, panel],
                    self.scales,
                    self.half_range,
                    self.output,
                )
                self.rows[below].addmm_(upper[panel, below].T, found, alpha=-1)
                self.rows[panel] = found
            window = upper[top:bottom, bottom:]
            self.rows[bottom:].addmm_(window.T, self.rows[top:bottom], alpha=-1)
        return [self._result(j) for j in range(len(self.groups))]

    def _result(self, j: int) -> RoundedMatrix:
        columns = slice(j * self.shape[1], (j + 1) * self.shape[1])
        begun = first_panels(self.groups[j], self.rows.device)
        return RoundedMatrix(
            codes=self.codes[:, columns].contiguous(),
            groups=self.groups[j],
            scale_codes=self.scale_codes[begun, j],
            max_scales=self.max_scales[begun, j],
            perm=self.factor.perm,
            fed_back=self.rows[:, columns] if self.keep_fed_back else None,
        )

    def _begin_groups(self, row: int) -> None:
        """Search the scales of all groups that begin at a row."""
        members = self.starts.get(row)
        if not members:
            return
        panel = row // PANEL_ROWS
        rows = slice(row, row + max(group.rows for group in members.values()))
        scales = Scales(
            codes=self.scale_codes[panel : panel + 1],
            maxima=self.max_scales[panel : panel + 1],
            decoded=self.scales.view(1, *self.shape),
        )
        weights = None if self.search == "grid" else self.row_weights[rows]
        self.ops.begin_groups(self.rows[rows], members, scales, self.half_range, weights)


def group_starts(matrices: Sequence[Sequence[Group]]) -> dict[int, dict[int, Group]]:
    """Return row → which matrices have a group that begins there → the group."""
    starts: dict[int, dict[int, Group]] = defaultdict(dict)
    for j, groups in enumerate(matrices):
        for group in groups:
            starts[group.start][j] = group
    return starts


def first_panels(groups: Sequence[Group], device: torch.device) -> torch.Tensor:
    """Return the panel that each group begins with, int64 (g,)."""
    return device_table(tuple(group.start // PANEL_ROWS for group in groups), device)


def side_by_side(outputs: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the blocks (blocks, b, b) of several matrices together; all have some, or none."""
    blocks = [output for output in outputs if output is not None]
    return torch.cat(blocks) if blocks else None
