"""Make a rounded matrix better without changing its layout: scales and codes in turn.

Both steps lower the same objective, tr(O Eᵀ H E) with E = Q - W: `H` from the inputs, `O` from the
gradients of the outputs, or the identity. Neither can raise it (`docs/concepts/quality.md`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from exl2flow.kernels import (
    MOST_COLUMNS,
    PANEL_ROWS,
    BegunGroups,
    Scales,
    device_table,
    get_ops,
    half_ranges,
    times_output,
)
from exl2flow.quant.gptq import WINDOW_ROWS, RoundedMatrix, first_panels, group_starts
from exl2flow.quant.hessian import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """hessian: damped, in act-order, fp32 (k, k); output: fp32 (blocks, b, b), None: identity."""

    hessian: torch.Tensor
    output: torch.Tensor | None = None


def refine(
    rounded: RoundedMatrix, weight: torch.Tensor, metric: Metric, *, rounds: int, sweeps: int
) -> RoundedMatrix:
    """Return the matrix after `rounds` of refitted scales and `sweeps` of coordinate descent.

    Args:
        rounded: where to begin; its layout and permutation are kept.
        weight: fp32 (k, n) in the order of the in-features, n padded.
        metric: what the error is measured in.
        rounds: how often both steps are done.
        sweeps: how often each round visits every code.
    """
    return refine_together([rounded], [weight], metric, rounds=rounds, sweeps=sweeps)[0]


def refine_together(
    rounded: Sequence[RoundedMatrix],
    weights: list[torch.Tensor],
    metric: Metric,
    *,
    rounds: int,
    sweeps: int,
) -> list[RoundedMatrix]:
    """Refine matrices of one shape and one permutation side by side; see `refine`.

    Args:
        rounded: where to begin.
        weights: of each, as for `refine`; taken out, for those of a head are as large as all else.
        metric: blocks of its output are those of all matrices in order.
        rounds: how often both steps are done.
        sweeps: how often each round visits every code.
    """
    state = _Refinement(rounded, weights, metric)
    weights.clear()

    def once() -> None:
        state.refit()
        for _ in range(sweeps):
            state.descend()

    if metric.output is not None and metric.output.shape[1] > MOST_COLUMNS:
        for _ in range(rounds):
            once()
    else:
        state.ops.repeat(once, rounds)
    return state.results()


class _Refinement:
    """The columns of `j` matrices side by side, m = j · n, rows in act-order.

    steps: signed codes fp32 (k, m); gradient: H E, fp32 (k, m); half_range: of every panel of rows,
    fp32 (panels, j, n), like the scales.
    """

    def __init__(
        self, rounded: Sequence[RoundedMatrix], weights: Sequence[torch.Tensor], metric: Metric
    ) -> None:
        self.rounded, self.metric = rounded, metric
        self.ops = get_ops(weights[0].device)
        k, n = weights[0].shape
        self.shape = len(rounded), n
        self.begun = {
            row: BegunGroups.of([members.get(j) for j in range(len(rounded))], weights[0].device)
            for row, members in group_starts([matrix.groups for matrix in rounded]).items()
        }
        self.longest = max(begun.longest for begun in self.begun.values())
        self.steps = torch.empty(k, n * len(rounded), device=weights[0].device)
        self.gradient = torch.empty_like(self.steps)
        layout = (k // PANEL_ROWS, *self.shape)
        decoded = torch.empty_like(self.steps[: layout[0]]).view(layout)
        self.half_range = torch.empty_like(decoded)
        self.scales = Scales(
            codes=torch.zeros_like(decoded, dtype=torch.uint8),
            maxima=torch.zeros_like(decoded[:, :, 0], dtype=torch.float16),
            decoded=decoded,
        )
        for j, (matrix, weight) in enumerate(zip(rounded, weights, strict=True)):
            self._read(j, matrix)
            for begin in range(0, n, max(1, CHUNK_ELEMENTS // k)):
                columns = slice(begin, begin + max(1, CHUNK_ELEMENTS // k))
                self._begin(j, columns, matrix.codes[:, columns], weight[:, columns][matrix.perm])

    def _begin(self, j: int, columns: slice, codes: torch.Tensor, weight: torch.Tensor) -> None:
        """Take over codes of a matrix, (k, c), and compute the gradient for its weights."""
        panels = len(self.half_range)
        steps = codes.float().view(panels, PANEL_ROWS, -1)
        steps -= self.half_range[:, j, None, columns]
        error = (steps * self.scales.decoded[:, j, None, columns]).view(weight.shape).sub_(weight)
        own = (len(weight), *self.shape)
        self.steps.view(own)[:, j, columns] = steps.view(weight.shape)
        self.gradient.view(own)[:, j, columns] = self.metric.hessian @ error

    def _read(self, j: int, matrix: RoundedMatrix) -> None:
        """Take over the scales of a matrix."""
        device = self.steps.device
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
        """Return the matrices as they are now."""
        panels, j, n = self.half_range.shape
        steps = self.steps.view(panels, PANEL_ROWS, j, n)
        codes = (steps + self.half_range[:, None]).to(torch.uint8).view(-1, j, n)
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

    def _windows(self) -> Iterator[tuple[int, int]]:
        k = len(self.steps)
        for top in range(0, k, WINDOW_ROWS):
            yield top, min(top + WINDOW_ROWS, k)

    def _follow(self, change: torch.Tensor, top: int, bottom: int) -> None:
        """Add a window's changes of values, (bottom - top, m), to the gradients outside of it."""
        for rows in (slice(0, top), slice(bottom, None)):
            self.gradient[rows].addmm_(self.metric.hessian[rows, top:bottom], change)

    def descend(self) -> None:
        """Visit every code once, panel after panel."""
        hessian = self.metric.hessian
        for top, bottom in self._windows():
            changes = []
            for begin in range(top, bottom, PANEL_ROWS):
                panel, index = slice(begin, begin + PANEL_ROWS), begin // PANEL_ROWS
                change = self.ops.descend_panel(
                    self.steps[panel],
                    times_output(self.gradient[panel].clone(), self.metric.output),
                    hessian[panel, panel],
                    self.scales.decoded[index].view(-1),
                    self.half_range[index].view(-1),
                    self.metric.output,
                )
                self.gradient[top:bottom].addmm_(hessian[top:bottom, panel], change)
                changes.append(change)
            self._follow(torch.cat(changes), top, bottom)

    def refit(self) -> None:
        """Choose every group's maximum and scale codes anew, codes kept."""
        k = len(self.steps)
        for top, bottom in self._windows():
            bottom_of_groups = min(bottom + self.longest - PANEL_ROWS, k)
            changes = torch.zeros_like(self.steps[top:bottom_of_groups])
            window = self.gradient[top:bottom_of_groups]
            for begin in range(top, bottom, PANEL_ROWS):
                begun = self.begun.get(begin)
                if begun is None:
                    continue
                end = begin + begun.longest
                change = self.ops.refit_scales(
                    self.steps[begin:end],
                    self.gradient[begin:end],
                    self.metric.hessian[begin:end, begin:end],
                    begun,
                    self.scales.of(slice(begin // PANEL_ROWS, end // PANEL_ROWS)),
                    self.metric.output,
                )
                window.addmm_(self.metric.hessian[top:bottom_of_groups, begin:end], change)
                changes[begin - top : end - top] += change
            self._follow(changes, top, bottom_of_groups)
