"""Improve a rounded matrix without changing its layout: scales and codes in turn.

Both steps reduce the same objective, tr(O Eᵀ H E) with E = Q - W: `H` from the inputs, `O` from the
gradients of the outputs, or the identity. Neither can increase it (`docs/concepts/quality.md`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from exl2flow.core.runtime.interrupt import look
from exl2flow.kernels import (
    CHUNK_ELEMENTS,
    MOST_COLUMNS,
    PANEL_ROWS,
    BegunGroups,
    Scales,
    device_table,
    get_ops,
    half_ranges,
    times_output,
)
from exl2flow.quant.rounding.error_feedback import (
    RoundedMatrix,
    add_product,
    first_panels,
    group_starts,
    rows_of,
)
from exl2flow.quant.walk.pinned import Tall


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """hessian: damped, in act-order, fp32 (k, k), or (f, k, k) of f times as many matrices.

    output: fp32 (blocks, b, b), None: identity.
    """

    hessian: torch.Tensor
    output: torch.Tensor | None = None


def refine(
    rounded: RoundedMatrix, weight: torch.Tensor, metric: Metric, *, rounds: int, sweeps: int
) -> RoundedMatrix:
    """Return the matrix after `rounds` of refitted scales and `sweeps` of coordinate descent.

    Args:
        rounded: the starting point; its layout and permutation are kept.
        weight: as in a `RoundingJob`.
        metric: of the error.
        rounds: repetitions of both steps.
        sweeps: visits to every code per round.
    """
    return refine_together([rounded], [weight], metric, rounds=rounds, sweeps=sweeps)[0]


def refine_together(
    rounded: list[RoundedMatrix],
    weights: list[torch.Tensor],
    metric: Metric,
    *,
    rounds: int,
    sweeps: int,
) -> list[RoundedMatrix]:
    """Refine matrices of one shape side by side; see `refine`.

    Args:
        rounded: the starting points; emptied, because a head's matrix is very large.
        weights: of each, as for `refine`; emptied, too.
        metric: its output blocks are those of all matrices in order.
        rounds: repetitions of both steps.
        sweeps: visits to every code per round.
    """
    state = _Refinement(rounded, weights, metric)
    weights.clear()
    rounded.clear()

    def once() -> None:
        state.refit()
        for _ in range(sweeps):
            state.descend()

    waits = metric.output is not None and metric.output.shape[1] > MOST_COLUMNS
    if waits or not state.gradient.is_resident:
        for _ in range(rounds):
            once()
    else:
        state.ops.repeat(once, rounds)
    return state.results()


class _Refinement:
    """The columns of `j` matrices side by side, m = j · n, rows in act-order.

    codes: uint8 (k, m); gradient: H E, fp32 (k, m); half_range: of every panel of rows, fp32
    (panels, j, n), like the scales.
    """

    def __init__(
        self, rounded: Sequence[RoundedMatrix], weights: Sequence[torch.Tensor], metric: Metric
    ) -> None:
        empty = torch.empty(0)  # replaces the codes, which change
        self.rounded = [replace(matrix, codes=empty, fed_back=None) for matrix in rounded]
        self.metric = metric
        device = metric.hessian.device
        self.ops = get_ops(device)
        k, n = weights[0].shape
        self.shape = len(rounded), n
        self.begun = {
            row: BegunGroups.of([members.get(j) for j in range(len(rounded))], device)
            for row, members in group_starts([matrix.groups for matrix in rounded]).items()
        }
        self.longest = max(begun.longest for begun in self.begun.values())
        self.codes = torch.cat([matrix.codes for matrix in rounded], dim=1)
        decoded = torch.empty(k // PANEL_ROWS, *self.shape, device=device)
        self.half_range = torch.empty_like(decoded)
        self.scales = Scales(
            codes=torch.zeros_like(decoded, dtype=torch.uint8),
            maxima=torch.zeros_like(decoded[:, :, 0], dtype=torch.float16),
            decoded=decoded,
        )
        for j, matrix in enumerate(rounded):
            self._read(j, matrix)
        self.gradient = Tall.empty(k, n * len(rounded), device)
        for rows, part in self.gradient.parts():
            part.zero_()
            self._add_gradient(rows, part, weights)

    def _add_gradient(
        self, rows: slice, part: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        """Compute some rows of the gradient, `H (Q - W)`, from errors of a few rows at a time."""
        k, m = self.codes.shape
        step = max(1, CHUNK_ELEMENTS // m // PANEL_ROWS) * PANEL_ROWS
        for begin in range(0, k, step):
            source = slice(begin, begin + step)
            error = self._steps(source).view(-1, PANEL_ROWS, m)
            error *= self._of_panels(self.scales.decoded, source)
            error = error.view(-1, m)
            for j, weight in enumerate(weights):
                index = self.rounded[j].perm[source]
                error.view(-1, *self.shape)[:, j] -= rows_of(weight, index)
            add_product(part, self.metric.hessian[..., rows, source], error)

    def _steps(self, rows: slice) -> torch.Tensor:
        """Return the signed codes of whole panels of rows, fp32 (r, m)."""
        steps = self.codes[rows].float().view(-1, PANEL_ROWS, self.codes.shape[1])
        steps -= self._of_panels(self.half_range, rows)
        return steps.view(-1, self.codes.shape[1])

    def _take(self, begin: int, steps: torch.Tensor) -> None:
        """Store signed codes of whole panels of rows, fp32 (r, m)."""
        rows = slice(begin, begin + len(steps))
        codes = steps.view(-1, PANEL_ROWS, steps.shape[1]) + self._of_panels(self.half_range, rows)
        self.codes[rows] = codes.view(steps.shape).to(torch.uint8)

    def _of_panels(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the values (p, 1, m) for the panels of some rows, out of all (panels, j, n)."""
        panels = values[rows.start // PANEL_ROWS : -(-rows.stop // PANEL_ROWS)]
        return panels.view(len(panels), 1, -1)

    def _read(self, j: int, matrix: RoundedMatrix) -> None:
        """Copy the scales of a matrix."""
        device = self.codes.device
        groups = list(enumerate(matrix.groups))
        panels = [(i, g.bits) for i, g in groups for _ in range(g.rows // PANEL_ROWS)]
        of_panel, bits = zip(*panels, strict=True)
        scales = self.ops.decode_scales(matrix.scale_codes, matrix.max_scales).float()
        self.scales.decoded[:, j] = scales[device_table(of_panel, device)]
        self.half_range[:, j] = half_ranges(bits, device)[:, None]
        begun = first_panels(matrix.groups, device)
        self.scales.codes[begun, j] = matrix.scale_codes
        self.scales.maxima[begun, j] = matrix.max_scales

    def results(self) -> list[RoundedMatrix]:
        """Return the current matrices."""
        codes = self.codes.view(-1, *self.shape)
        found = []
        for place, matrix in enumerate(self.rounded):
            begun = first_panels(matrix.groups, codes.device)
            found.append(
                replace(
                    matrix,
                    codes=codes[:, place].contiguous(),
                    scale_codes=self.scales.codes[begun, place],
                    max_scales=self.scales.maxima[begun, place],
                )
            )
        return found

    def _follow(self, change: torch.Tensor, top: int, bottom: int) -> None:
        """Add a window's changes of values, (bottom - top, m), to the gradients outside it."""
        for begin, end in ((0, top), (bottom, len(self.codes))):
            for rows, part in self.gradient.parts(begin, end):
                add_product(part, self.metric.hessian[..., rows, top:bottom], change)

    def _pushed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient times O, fp32 (r, m), which may be overwritten."""
        output = self.metric.output
        return gradient.clone() if output is None else times_output(gradient, output)

    def descend(self) -> None:
        """Visit every code once, one panel after another."""
        for top, bottom in self.gradient.windows():
            hessian = self.metric.hessian[..., top:bottom, top:bottom]
            gradient, steps = self.gradient.read(top, bottom), self._steps(slice(top, bottom))
            changes = []
            for begin in range(0, bottom - top, PANEL_ROWS):
                look()
                panel, index = slice(begin, begin + PANEL_ROWS), (top + begin) // PANEL_ROWS
                change = self.ops.descend_panel(
                    steps[panel],
                    self._pushed(gradient[panel]),
                    hessian[..., panel, panel],
                    self.scales.decoded[index].view(-1),
                    self.half_range[index].view(-1),
                    self.metric.output,
                )
                add_product(gradient, hessian[..., panel], change)
                changes.append(change)
            self._take(top, steps)
            self.gradient.write(top, gradient)
            self._follow(torch.cat(changes), top, bottom)

    def refit(self) -> None:
        """Choose every group's maximum and scale codes again, with the codes fixed."""
        k = len(self.codes)
        for top, end in self.gradient.windows():
            bottom = min(end + self.longest - PANEL_ROWS, k)  # of groups that begin in the window
            hessian = self.metric.hessian[..., top:bottom, top:bottom]
            gradient, steps = self.gradient.read(top, bottom), self._steps(slice(top, bottom))
            changes = torch.zeros_like(steps)
            for row in range(top, end, PANEL_ROWS):
                look()
                begun = self.begun.get(row)
                if begun is None:
                    continue
                group = slice(row - top, row - top + begun.longest)
                change = self.ops.refit_scales(
                    steps[group],
                    gradient[group],
                    hessian[..., group, group],
                    begun,
                    self.scales.of(slice(row // PANEL_ROWS, (row + begun.longest) // PANEL_ROWS)),
                    self.metric.output,
                )
                add_product(gradient, hessian[..., group], change)
                changes[group] += change
            self.gradient.write(top, gradient)
            self._follow(changes, top, bottom)
