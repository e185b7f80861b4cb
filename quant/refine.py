"""Make a rounded matrix better without changing its layout: scales and codes in turn.

Both steps lower the same objective, tr(O Eᵀ H E) with E = Q - W: `H` from the inputs, `O` from the
gradients of the outputs, or the identity. Neither can raise it (`docs/concepts/quality.md`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from exl2flow.kernels import Group, get_ops
from exl2flow.quant.gptq import PANEL_ROWS, RoundedMatrix

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
    state = _Refinement(rounded, weight, metric)
    for _ in range(rounds):
        state.refit()
        for _ in range(sweeps):
            state.descend()
    return state.result()


class _Refinement:
    """steps: signed codes fp32 (k, n); gradient: H E, fp32 (k, n); both in act-order."""

    def __init__(self, rounded: RoundedMatrix, weight: torch.Tensor, metric: Metric) -> None:
        self.rounded = rounded
        self.metric = metric
        self.ops = get_ops(weight.device)
        self.scale_codes = rounded.scale_codes.clone()
        self.maxima = rounded.max_scales.clone()
        self.scales = self.ops.decode_scales(self.scale_codes, self.maxima).float()  # (g, n)
        self.steps = rounded.codes.float()
        error = torch.empty_like(self.steps)
        for index, group, rows in self._groups():
            self.steps[rows] -= 2.0 ** (group.bits - 1)
            error[rows] = self.steps[rows] * self.scales[index]
        error -= weight[rounded.perm]
        self.gradient = metric.hessian @ error

    def _groups(self) -> Iterator[tuple[int, Group, slice]]:
        for index, group in enumerate(self.rounded.groups):
            yield index, group, slice(group.start, group.start + group.rows)

    def result(self) -> RoundedMatrix:
        """Return the matrix as it is now."""
        codes = torch.empty_like(self.rounded.codes)
        for _, group, rows in self._groups():
            codes[rows] = (self.steps[rows] + 2.0 ** (group.bits - 1)).to(torch.uint8)
        return replace(
            self.rounded, codes=codes, scale_codes=self.scale_codes, max_scales=self.maxima
        )

    def descend(self) -> None:
        """Visit every code once, panel after panel."""
        for index, group, rows in self._groups():
            half_range = torch.full_like(self.scales[index], 2.0 ** (group.bits - 1))
            for begin in range(rows.start, rows.stop, PANEL_ROWS):
                panel = slice(begin, begin + PANEL_ROWS)
                change = self.ops.descend_panel(
                    self.steps[panel],
                    self.metric.times_output(self.gradient[panel].clone()),
                    self.metric.hessian[panel, panel],
                    self.scales[index],
                    half_range,
                    self.metric.output,
                )
                self.gradient.addmm_(self.metric.hessian[:, panel], change)

    def refit(self) -> None:
        """Choose every group's maximum and scale codes anew, codes kept."""
        for index, _, rows in self._groups():
            self._refit_group(index, rows)

    def _refit_group(self, index: int, rows: slice) -> None:
        """Move a group's scales towards their optimum, as far as the objective falls."""
        steps, scales = self.steps[rows], self.scales[index]
        inner = self.metric.hessian[rows, rows] @ steps  # (r, n)
        curvature = (inner * steps).sum(dim=0) * self.metric.output_diagonal(len(scales))
        pushed = self.metric.times_output(self.gradient[rows])
        slope = (pushed * steps).sum(dim=0)
        wanted = -slope / curvature.clamp(min=1e-30) * (curvature > 0)
        for strength in STRENGTHS:
            codes, maximum = self._nearest_scales(index, scales + strength * wanted, curvature)
            found = self.ops.decode_scales(codes[None], maximum[None])[0].float()
            change = steps * (found - scales)  # (r, n)
            moved = self.metric.hessian[rows, rows] @ self.metric.times_output(change)
            if float(((moved + 2 * pushed) * change).sum()) < 0:
                self.gradient.addmm_(self.metric.hessian[:, rows], change)
                self.scales[index] = found
                self.scale_codes[index], self.maxima[index] = codes, maximum
                return

    def _nearest_scales(
        self, index: int, wanted: torch.Tensor, curvature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes uint8 (n,) and maximum fp16 () whose scales are nearest to `wanted`."""
        span = torch.linspace(-MAXIMA_SPAN, MAXIMA_SPAN, MAXIMA, device=wanted.device)
        maxima = (self.maxima[index].float() * (1 + span)).half()  # (MAXIMA,)
        unit = (maxima.float() / 256).half().float().clamp(min=1e-12)
        root = (wanted.clamp(min=0) / unit[:, None]).sqrt().floor()  # (MAXIMA, n)
        levels = torch.stack([root, root + 1]).clamp(1, LEVELS)  # (2, MAXIMA, n)
        codes = (levels - 1).to(torch.uint8)
        scales = self.ops.decode_scales(codes, maxima.expand(2, MAXIMA)).float()
        miss, chosen = (scales - wanted).abs().min(dim=0)  # (MAXIMA, n)
        best = (miss.square() * curvature).sum(dim=1).argmin()
        return codes[:, best].gather(0, chosen[best][None])[0], maxima[best]
