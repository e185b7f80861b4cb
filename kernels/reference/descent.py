"""Coordinate descent within a row: the part of the torch twin that rounds in an output metric.

See `docs/concepts/quality.md`, section 3.
"""

import torch

CLASSES = 4  # columns of a row that descend together are this far apart
START_SWEEPS = 3  # sweeps of a row's descent when it is first rounded
RETRIES = 2  # of changes that help individually but not together


class RowDescent:
    """Coordinate descent in one row on h e eᵀ + 2 e gᵀ, e = steps · scales: columns independent.

    Rows are read and changed in its own column order (`ordered`, `restored`).
    """

    def __init__(self, scales: torch.Tensor, half_range: torch.Tensor) -> None:
        self.scales, self.low, self.high = scales, -half_range, half_range - 1
        self.inverse = torch.where(scales > 0, 1 / scales, 0)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (..., m) with its columns in the order of `settle` and `descend`."""
        return x

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `ordered`."""
        return x

    def settle(self, step: torch.Tensor, row: torch.Tensor) -> None:
        """Improve steps (m,), a row (m,) rounded to nearest, in place."""

    def descend(self, step: torch.Tensor, gradient: torch.Tensor, curvature: float) -> torch.Tensor:
        """Improve `step` (m,) and its `gradient` (m,) in place; return the change times O."""
        best = torch.addcmul(step, gradient, self.inverse, value=-1 / curvature).round_()
        torch.clamp(best, self.low, self.high, out=best)
        change = torch.sub(best, step).mul_(self.scales)
        gradient.add_(change, alpha=curvature)
        step.copy_(best)
        return change


class CoupledRowDescent(RowDescent):
    """The same on h e O eᵀ + 2 e gᵀ; g, the `gradient`, is already multiplied by O.

    Every `CLASSES`-th column of a block moves at the same time, each to its own best step; these
    columns are ordered side by side. If that makes a block's part of the row worse, because columns
    depend on each other, only the strongest changes are tried again.
    """

    def __init__(
        self, scales: torch.Tensor, half_range: torch.Tensor, output: torch.Tensor
    ) -> None:
        self.shape = output.shape[:2]
        inside = torch.arange(output.shape[1], device=output.device).view(-1, CLASSES).T.flatten()
        self.inside, self.outside = inside, inside.argsort()
        super().__init__(self.ordered(scales), self.ordered(half_range))
        self.output = output[:, inside[:, None], inside]  # (blocks, b, b)
        diagonal = self.output.diagonal(dim1=1, dim2=2).reshape(-1)
        self.inverse = self.inverse / diagonal
        columns = (self.scales, self.inverse, self.low, self.high, diagonal)
        self.classes = list(  # each (blocks, b / CLASSES), then the rows of O (blocks, ..., b)
            zip(*(self._parts(x) for x in columns), self.output.chunk(CLASSES, dim=1), strict=True)
        )

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the classes of x (m,), as views (blocks, b / CLASSES)."""
        return x.view(self.shape).chunk(CLASSES, dim=1)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """See `RowDescent`."""
        return x.view(-1, *self.shape)[..., self.inside].view(x.shape)

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """See `RowDescent`."""
        return x.view(-1, *self.shape)[..., self.outside].view(x.shape)

    def settle(self, step: torch.Tensor, row: torch.Tensor) -> None:
        """See `RowDescent`."""
        error = torch.addcmul(row, step, self.scales, value=-1).neg_()
        gradient = _block_product(error.view(self.shape), self.output).view(-1)
        self._sweep(step, gradient, 1.0, times=START_SWEEPS)

    def descend(self, step: torch.Tensor, gradient: torch.Tensor, curvature: float) -> torch.Tensor:
        """See `RowDescent`."""
        before = gradient.clone()
        self._sweep(step, gradient, curvature, times=1)
        return torch.sub(gradient, before).div_(curvature)

    def _sweep(
        self, step: torch.Tensor, gradient: torch.Tensor, curvature: float, *, times: int
    ) -> None:
        """Move all classes in turn."""
        steps, slopes = self._parts(step), self._parts(gradient)
        whole = gradient.view(self.shape)
        for _ in range(times):
            for index in range(CLASSES):
                pushed = self._move(index, steps[index], slopes[index], curvature)
                if pushed is not None:
                    whole.add_(pushed, alpha=curvature)

    def _move(
        self, index: int, step: torch.Tensor, slope: torch.Tensor, curvature: float
    ) -> torch.Tensor | None:
        """Move a class of columns in the blocks where this lowers the objective."""
        scales, inverse, low, high, diagonal, output = self.classes[index]
        best = torch.addcmul(step, slope, inverse, value=-1 / curvature).round_()
        torch.clamp(best, low, high, out=best)
        if torch.equal(best, step):
            return None
        change = torch.sub(best, step).mul_(scales)  # (blocks, b / CLASSES)
        width = change.shape[1]
        for attempt in range(1, RETRIES + 3):
            pushed = _block_product(change, output)
            part = pushed.narrow(1, index * width, width)
            rise = torch.add(slope, part, alpha=curvature / 2).mul_(change).sum(dim=1, keepdim=True)
            if float(rise.max()) <= 0:
                break
            gain = -change * (curvature * change * diagonal + 2 * slope)
            weak = gain < gain.amax(dim=1, keepdim=True) * (attempt / RETRIES)
            change[(rise > 0) & weak if attempt <= RETRIES else (rise > 0).expand_as(change)] = 0
            best = torch.where(change != 0, best, step)
        step.copy_(best)
        return pushed


def descent_of(
    scales: torch.Tensor, half_range: torch.Tensor, output: torch.Tensor | None
) -> RowDescent:
    """Return the descent of a row whose columns are independent, or coupled by O."""
    if output is None:
        return RowDescent(scales, half_range)
    return CoupledRowDescent(scales, half_range, output)


def _block_product(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return x B per block: x (blocks, a), B (blocks, a, b) → (blocks, b)."""
    if len(x) == 1:
        return torch.mv(blocks[0].t(), x[0])[None]
    return torch.bmm(x[:, None], blocks)[:, 0]
