"""Correct the target of rounding for the errors of the sublayers before.

Rounding towards W on quantized inputs X̂ preserves X̂W, not the source's XW. The least-squares target
for the latter is W + (X̂ᵀX̂)⁻¹ X̂ᵀ(X - X̂) W; a strength below 1 goes part of the way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from exl2flow.core.runtime.interrupt import look
from exl2flow.core.runtime.memory import limit_of
from exl2flow.kernels import CHUNK_ELEMENTS
from exl2flow.model import DenseLinear, Head, Linear, Sublayer
from exl2flow.model.layers.experts import RoutedReads
from exl2flow.quant.rounding.coverage import Coverage
from exl2flow.quant.rounding.hessian import LEAST_DAMPING, LEAST_MEAN
from exl2flow.quant.walk.divergence import mean_divergence
from exl2flow.quant.walk.pinned import is_tall
from exl2flow.quant.walk.source_model import device_of, relative_distance, row_batches

log = logging.getLogger(__name__)

SOLVED_TOGETHER = 1 << 29  # elements, 2 GiB; a larger solution is found in pieces of a quarter
PAIRED_ROWS = 40  # most rows that run through the source beside the quantized model
JUDGE_STEP = 8  # every eighth of them judges a correction


class CrossProducts:
    """Sums `X̂ᵀ(X - X̂)` over rows while advancing the source's states."""

    def __init__(self, sublayer: Sublayer, source: torch.Tensor, rows: range) -> None:
        """Begin with zeros.

        Args:
            sublayer: with the source's weights.
            source: states fp32 (p, t, hidden) of the source; advanced in place.
            rows: the row numbers that they belong to.
        """
        self.sublayer, self.source, self.rows = sublayer, source, rows
        self._fitting = fitting(len(rows))
        self._wanted: dict[int, dict[str, torch.Tensor]] = {}
        self._tokens: dict[str, int] = {}  # by capture of an expert
        self._changed = list[torch.Tensor]()  # shares of routes that differ, by row
        self._sums: dict[str, torch.Tensor] = {}

    def together(self, rows: range) -> Iterator[list[int]]:
        """Yield which of these rows the source has, by number, divided as they pass together.

        Source rows pass one at a time; those of experts, which read few tokens of each, together
        but for the ones that judge.
        """
        judging, others = list[list[int]](), list[int]()
        for row in rows:
            if row in self.rows:
                place = self.rows.index(row)
                is_alone = self.sublayer.spec.group is None or place % JUDGE_STEP == 0
                judging.append([row]) if is_alone else others.append(row)
        yield from sorted([*judging, others]) if others else judging

    def advance(self, rows: Sequence[int]) -> None:
        """Advance the source's states of rows."""
        self._leave(rows, self.sublayer(self._entering(rows)))

    def _entering(self, rows: Sequence[int]) -> torch.Tensor:
        device, places = device_of(self.sublayer), [self.rows.index(row) for row in rows]
        parts = [self.source[place : place + 1].to(device, non_blocking=True) for place in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _leave(self, rows: Sequence[int], outputs: torch.Tensor) -> None:
        for row, output in zip(rows, outputs, strict=True):
            self.source[self.rows.index(row)].copy_(output, non_blocking=True)

    def add(self, rows: Sequence[int], read: Mapping[str, torch.Tensor]) -> None:
        """Add what projections of the quantized model read of rows, see `Sublayer.reads`.

        Experts read the same tokens in the source as in the quantized model.
        """
        hidden = self._entering(rows)
        wanted: Mapping[str, torch.Tensor] = self.sublayer.reads(hidden)
        outputs = self.sublayer.output(hidden, wanted)
        place, is_routed = self.rows.index(rows[0]), self.sublayer.spec.group is not None
        if is_routed:
            self._changed += [differing(wanted, read)] * len(rows)
            wanted = self.sublayer.reads_like(hidden, read)
            if place % JUDGE_STEP == 0:
                self._wanted[place] = self.sublayer.contributions(hidden, wanted)
        self._leave(rows, outputs)  # which `hidden` may be
        if place not in self._fitting:
            return
        for capture, x in wanted.items():
            quantized = read[capture].flatten(0, -2)
            if capture not in self._sums:
                k = quantized.shape[-1]
                self._sums[capture] = torch.zeros(k, k, device=quantized.device)
            if is_routed:
                self._tokens[capture] = self._tokens.get(capture, 0) + len(quantized)
            self._sums[capture].addmm_(quantized.T, x.flatten(0, -2) - quantized)

    def wanted(self) -> list[Mapping[str, torch.Tensor]]:
        """Return what parts of the source contribute to the rows that judge, by unit."""
        return [
            self._wanted.get(place) or {"": self.source[place][None]}
            for place in range(0, len(self.rows), JUDGE_STEP)
        ]

    def means(self) -> dict[str, torch.Tensor]:
        """Return capture name → the mean over rows, fp32 (k, k); of experts, over their tokens.

        Consumes the sums.
        """
        sums, self._sums = self._sums, {}
        return {
            capture: total.div_(max(1, self._tokens.get(capture, len(self._fitting))))
            for capture, total in sums.items()
        }

    def changed_routes(self) -> float | None:
        """Return the share of choices of experts that differ from the source's, if known."""
        return float(torch.stack(self._changed).mean()) if self._changed else None


def differing(ours: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the share of chosen experts that others did not choose for the same token, ()."""
    assert isinstance(ours, RoutedReads)
    assert isinstance(others, RoutedReads)
    ids, other_ids = ours.routes.ids, others.routes.ids
    return (ids[:, :, None] != other_ids[:, None]).all(-1).float().mean()


def advance_source(sublayer: Sublayer, source: CrossProducts, states: torch.Tensor) -> None:
    """Run source rows through a sublayer in place, with the same bits as `CrossProducts.add`.

    In the same batches as there, because a GPU may sum products of another shape in another order.

    Args:
        sublayer: with the source's weights.
        source: which has seen nothing.
        states: of all rows of the quantized model, fp32 (rows, t, hidden).
    """
    for batch in row_batches(sublayer, states):
        for rows in source.together(range(batch.start, batch.stop)):
            look()
            source.advance(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """strength: how far to go, 0 to 1; damping: added to a Hessian, in mean diagonals.

    note: records where nothing could be corrected.
    """

    strength: float
    damping: float
    note: Callable[[str], None] = lambda text: None

    def move(self, hessian: torch.Tensor, cross: torch.Tensor, *, name: str) -> torch.Tensor | None:
        """Return the factor fp32 (k, k) on the inputs that compensates part of their error.

        None if the damped Hessian has no Cholesky factor.

        Args:
            hessian: mean over rows of `X̂ᵀX̂`, fp32 (k, k).
            cross: mean over rows of `X̂ᵀ(X - X̂)`, fp32 (k, k); a large one is overwritten.
            name: the activation, for the note.
        """
        damped = hessian.clone()
        mean = hessian.diagonal().mean()
        damping = max(self.damping, LEAST_DAMPING)
        damped.diagonal().add_((damping * mean).clamp(min=LEAST_MEAN))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if failed:
            self.note(f"{name}: no correction, the damped Hessian has no Cholesky factor")
            log.warning("projection=%s remedy=no correction", name)
            return None
        if cross.numel() <= SOLVED_TOGETHER:
            return torch.cholesky_solve(cross, lower).mul_(self.strength)
        width = SOLVED_TOGETHER // 4 // len(cross)
        for columns in torch.split(cross, width, dim=1):  # saves two copies
            columns.copy_(torch.cholesky_solve(columns, lower))
        return cross.mul_(self.strength)

    def sublayer_targets(
        self,
        sublayer: Sublayer,
        states: torch.Tensor,
        hessians: Mapping[str, torch.Tensor],
        crosses: CrossProducts,
        coverage: Coverage | None = None,
    ) -> dict[str, Linear]:
        """Return the targets if they bring outputs closer to the source's, else the weights.

        Experts are judged one by one, on the tokens that they read in the quantized model.

        Args:
            sublayer: with the source's weights.
            states: inputs fp32 (rows, t, hidden) in the quantized model.
            hessians: by capture, fp32 (k, k).
            crosses: has seen all rows.
            coverage: of experts, whose Hessians may be mixed with that of their layer.
        """
        means, paired = crosses.means(), states[:: crosses.rows.step]
        source = dict(sublayer.linears)
        if coverage is not None:
            for capture, cross in means.items():
                cross.mul_(coverage.share_of(capture, len(cross)))
        targets = dict[str, Linear]()
        for capture, hessian in hessians.items():
            members = sublayer.spec.reading(capture)
            move = self.move(hessian, means.pop(capture), name=members[0].reads)
            targets |= {p.name: moved(source[p.name], move) for p in members}
        errors, wanted = [], crosses.wanted()
        for linears in (source, targets):
            sublayer.linears.update(linears)
            errors.append(output_errors(sublayer, _judging(paired), wanted))
        sublayer.linears.update(source)
        plain, corrected = errors
        helped = {unit for unit in plain if corrected[unit] < plain[unit]}
        return {
            p.name: (targets if sublayer.spec.unit(p) in helped else source)[p.name]
            for p in sublayer.spec.projections
        }

    def head_target(
        self, head: Head, hessian: torch.Tensor, states: torch.Tensor, source: torch.Tensor
    ) -> Linear:
        """Return the head's target if predictions come closer to the source's, else its weight.

        Args:
            head: of the source.
            hessian: of its inputs, fp32 (hidden, hidden).
            states: final states of the quantized model for the paired rows, fp32 (p, t, hidden).
            source: those of the source.
        """
        rows = fitting(len(states))

        def read(row: torch.Tensor) -> torch.Tensor:
            return head.normed(row.to(hessian.device))

        cross = torch.zeros_like(hessian)
        for row in rows:
            quantized = read(states[row])
            cross += quantized.T @ (read(source[row]) - quantized)
        move = self.move(hessian, cross / len(rows), name="lm_head")
        target = moved(head.linear, move)

        def error(linear: Linear) -> float:
            return mean_divergence(
                head, _judging(source), head.with_linear(linear), _judging(states)
            )

        return target if error(target) < error(head.linear) else head.linear


def moved(linear: Linear, move: torch.Tensor | None) -> Linear:
    """Return a projection with the target `W + move W` as its weight; unchanged if `move` is None.

    fp32, because fp16 raises the KL divergence by 2.6 %; tall matrices keep the weight's dtype.
    """
    if move is None:
        return linear
    n, k = linear.weight.shape
    narrow = is_tall(n * k, limit_of(linear.weight.device))
    target = torch.empty_like(linear.weight, dtype=None if narrow else torch.float32)
    step = max(1, CHUNK_ELEMENTS // k)
    for begin in range(0, n, step):
        look()
        part = linear.weight[begin : begin + step].float()
        target[begin : begin + step] = torch.addmm(part, part, move.T)
    return DenseLinear(target, linear.bias)


def output_errors(
    sublayer: Sublayer, states: torch.Tensor, wanted: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """Return by unit the mean over rows of ‖y - y_source‖ / ‖y_source‖ with the current linears.

    Args:
        sublayer: of the quantized model.
        states: that enter it, fp32 (rows, t, hidden).
        wanted: what the source's units contribute, by row; those without tokens do not count.
    """
    device, errors = device_of(sublayer), dict[str, list[torch.Tensor]]()
    for row, expected in zip(states, wanted, strict=True):
        hidden = row[None].to(device, non_blocking=True)
        for unit, y in sublayer.contributions(hidden, sublayer.reads(hidden)).items():
            if len(y):
                errors.setdefault(unit, []).append(relative_distance(y, expected[unit]))
    means = torch.stack([torch.stack(found).mean() for found in errors.values()])
    return dict(zip(errors, means.tolist(), strict=True))


def paired_rows(rows: int) -> range:
    """Return the rows that run through the source beside the quantized model."""
    return range(0, rows, -(-rows // PAIRED_ROWS))


def fitting(pairs: int) -> Sequence[int]:
    """Return the indices of the pairs that fit a correction: all but the ones that judge it."""
    return [place for place in range(pairs) if place % JUDGE_STEP] or range(pairs)


def _judging(states: torch.Tensor) -> torch.Tensor:
    return states[::JUDGE_STEP]
