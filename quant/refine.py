"""Make a rounded matrix better without changing its layout: scales and codes in turn.

Both steps lower the same objective, tr(O Eᵀ H E) with E = Q - W: `H` from the inputs, `O` from the
gradients of the outputs, or the identity. Neither can raise it (`docs/concepts/quality.md`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from exl2flow.kernels import PANEL_ROWS, device_table, get_ops, half_ranges
from exl2flow.quant.gptq import WINDOW_ROWS, RoundedMatrix, first_panels, group_starts

MAXIMA = 31  # maxima tried around the present one
MAXIMA_SPAN = 0.15  # how far, relative to it
LEVELS = 16  # scale codes
STRENGTHS = (1.0, 0.5)  # parts of the wanted change of scales that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """hessian: damped, in act-order, fp32 (k, k); output: fp32 (blocks, b, b), None: identity."""

    hessian: torch.Tensor
    output: torch.Tensor | None = None

    def times_output(self, x: torch.Tensor) -> torch.Tensor:
        """Return x O for x (r, n)."""
        if self.output is None:
            return x
        blocks, b, _ = self.output.shape
        wide = torch.bmm(x.view(-1, blocks, b).transpose(0, 1), self.output)
        return wide.transpose(0, 1).reshape(x.shape)

    def output_diagonal(self, n: int) -> torch.Tensor:
        """Return the diagonal of O, fp32 (n,)."""
        if self.output is None:
            return torch.ones(n, device=self.hessian.device)
        return self.output.diagonal(dim1=1, dim2=2).flatten()


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
    weights: Sequence[torch.Tensor],
    metric: Metric,
    *,
    rounds: int,
    sweeps: int,
) -> list[RoundedMatrix]:
    """Refine matrices of one shape and one permutation side by side; see `refine`.

    Args:
        rounded: where to begin.
        weights: of each, as for `refine`.
        metric: blocks of its output are those of all matrices in order.
        rounds: how often both steps are done.
        sweeps: how often each round visits every code.
    """
    state = _Refinement(rounded, weights, metric)
    for _ in range(rounds):
        state.refit()
        for _ in range(sweeps):
            state.descend()
    return state.results()


class _Refinement:
    """The columns of `j` matrices side by side, m = j · n, rows in act-order.

    steps: signed codes fp32 (k, m); gradient: H E, fp32 (k, m). Decoder scales and half ranges are
    kept for every panel of rows, fp32 (panels, j, n); scale codes and maxima at the panel that a
    group begins with.
    """

    def __init__(
        self, rounded: Sequence[RoundedMatrix], weights: Sequence[torch.Tensor], metric: Metric
    ) -> None:
        self.rounded, self.metric = rounded, metric
        self.ops = get_ops(weights[0].device)
        k, n = weights[0].shape
        self.shape = len(rounded), n
        self.starts = group_starts([matrix.groups for matrix in rounded])
        self.largest = max(group.rows for matrix in rounded for group in matrix.groups)
        self.steps = torch.cat([matrix.codes for matrix in rounded], dim=1).float()
        layout = (k // PANEL_ROWS, *self.shape)
        self.scales = torch.empty_like(self.steps[: layout[0]]).view(layout)
        self.half_range = torch.empty_like(self.scales)
        self.scale_codes = torch.zeros_like(self.scales, dtype=torch.uint8)
        self.maxima = torch.zeros_like(self.scales[:, :, 0], dtype=torch.float16)
        for j, matrix in enumerate(rounded):
            self._read(j, matrix)
        flat = (layout[0], 1, -1)
        steps = self.steps.view(layout[0], PANEL_ROWS, -1).sub_(self.half_range.view(flat))
        error = (steps * self.scales.view(flat)).view(k, -1)
        error -= torch.cat(list(weights), dim=1)[rounded[0].perm]
        self.gradient = metric.hessian @ error

    def _read(self, j: int, matrix: RoundedMatrix) -> None:
        """Take over the scales of a matrix."""
        device = self.steps.device
        groups = list(enumerate(matrix.groups))
        panels = [(i, g.bits) for i, g in groups for _ in range(g.rows // PANEL_ROWS)]
        of_panel, bits = zip(*panels, strict=True)
        scales = self.ops.decode_scales(matrix.scale_codes, matrix.max_scales).float()
        self.scales[:, j] = scales[device_table(of_panel, device)]
        self.half_range[:, j] = half_ranges(bits, device)[:, None]
        begun = first_panels(matrix.groups, device)
        self.scale_codes[begun, j] = matrix.scale_codes
        self.maxima[begun, j] = matrix.max_scales

    def results(self) -> list[RoundedMatrix]:
        """Return the matrices as they are now."""
        panels, j, n = self.scales.shape
        steps = self.steps.view(panels, PANEL_ROWS, j, n)
        codes = (steps + self.half_range[:, None]).to(torch.uint8).view(-1, j, n)
        found = []
        for place, matrix in enumerate(self.rounded):
            begun = first_panels(matrix.groups, codes.device)
            found.append(
                replace(
                    matrix,
                    codes=codes[:, place].contiguous(),
                    scale_codes=self.scale_codes[begun, place],
                    max_scales=self.maxima[begun, place],
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
                    self.metric.times_output(self.gradient[panel].clone()),
                    hessian[panel, panel],
                    self.scales[index].view(-1),
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
            bottom_of_groups = min(bottom + self.largest - PANEL_ROWS, k)
            changes = torch.zeros_like(self.steps[top:bottom_of_groups])
            window = self.gradient[top:bottom_of_groups]
            for begin in range(top, bottom, PANEL_ROWS):
                for rows, members in self.starts.get(begin, {}).items():
                    group = slice(begin, begin + rows)
                    change = self._refit_groups(group, tuple(members))
                    window.addmm_(self.metric.hessian[top:bottom_of_groups, group], change)
                    changes[begin - top : begin - top + rows] += change
            self._follow(changes, top, bottom_of_groups)

    def _refit_groups(self, rows: slice, members: tuple[int, ...]) -> torch.Tensor:
        """Move scales of groups towards their optimum, as far as each matrix's objective falls.

        Args:
            rows: of the groups.
            members: the matrices that have such a group.

        Returns:
            The change of values, fp32 (r, m).
        """
        j, n = self.shape
        panels = slice(rows.start // PANEL_ROWS, rows.stop // PANEL_ROWS)
        own, steps = self.metric.hessian[rows, rows], self.steps[rows]
        scales = self.scales[panels.start].clone()  # (j, n)
        curvature = ((own @ steps) * steps).sum(dim=0) * self.metric.output_diagonal(j * n)
        pushed = self.metric.times_output(self.gradient[rows])
        slope = (pushed * steps).sum(dim=0)
        wanted = (-slope / curvature.clamp(min=1e-30) * (curvature > 0)).view(j, n)
        is_open = torch.zeros(j, dtype=torch.bool, device=steps.device)
        is_open[device_table(members, steps.device)] = True
        for strength in STRENGTHS:
            codes, maxima = self._nearest_scales(
                self.maxima[panels.start], scales + strength * wanted, curvature.view(j, n)
            )
            found = self.ops.decode_scales(codes, maxima).float()
            change = steps * (found - scales).view(-1)  # (r, m)
            moved = own @ self.metric.times_output(change)
            rise = ((moved + 2 * pushed) * change).view(-1, j, n).sum(dim=(0, 2))
            taken = is_open & (rise < 0)
            is_open = is_open & ~taken
            each = taken[:, None]
            self.scales[panels] = torch.where(each, found, self.scales[panels])
            self.scale_codes[panels.start] = torch.where(
                each, codes, self.scale_codes[panels.start]
            )
            self.maxima[panels.start] = torch.where(taken, maxima, self.maxima[panels.start])
        return steps * (self.scales[panels.start] - scales).view(-1)

    def _nearest_scales(
        self, present: torch.Tensor, wanted: torch.Tensor, curvature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes uint8 (j, n) and maxima fp16 (j,) whose scales are nearest to `wanted`.

        Args:
            present: maxima fp16 (j,).
            wanted: scales fp32 (j, n).
            curvature: fp32 (j, n), weight of each column's squared miss.
        """
        span = torch.linspace(-MAXIMA_SPAN, MAXIMA_SPAN, MAXIMA, device=wanted.device)
        maxima = (present[:, None].float() * (1 + span)).half()  # (j, MAXIMA)
        unit = (maxima.float() / 256).half().float().clamp(min=1e-12)
        root = (wanted.clamp(min=0)[:, None] / unit[:, :, None]).sqrt().floor()  # (j, MAXIMA, n)
        levels = torch.stack([root, root + 1]).clamp(1, LEVELS)
        codes = (levels - 1).to(torch.uint8)  # (2, j, MAXIMA, n)
        scales = self.ops.decode_scales(codes, maxima.expand(2, *maxima.shape)).float()
        miss, chosen = (scales - wanted[:, None]).abs().min(dim=0)  # (j, MAXIMA, n)
        best = (miss.square() * curvature[:, None]).sum(dim=2).argmin(dim=1)
        place = best[:, None, None].expand(-1, 1, wanted.shape[1])
        nearest = torch.where(chosen == 0, codes[0], codes[1]).gather(1, place)[:, 0]
        return nearest, maxima.gather(1, best[:, None])[:, 0]
