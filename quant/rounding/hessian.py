"""Hessians of a projection's inputs: accumulated over rows, damped, factored.

`H = Σ XᵀX / rows`. The factor that error feedback needs is the upper Cholesky factor `U` of the
inverse of the damped, act-ordered `H` (`docs/format.md` section 4).
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch

from exl2flow.core.errors import SingularHessian
from exl2flow.core.runtime.interrupt import look
from exl2flow.kernels import CHUNK_ELEMENTS, tensor_cores
from exl2flow.model import Head, Sublayer, narrowed
from exl2flow.quant.rounding.coverage import LAYER, Coverage, mixed_into
from exl2flow.quant.walk.deal import Deal, MatrixSum, NamedSums, PieceSums
from exl2flow.quant.walk.source_model import StatesCheck, device_of, placed_like, row_batches

log = logging.getLogger(__name__)

LEAST_DAMPING = 1e-5
IDENTITY = "identity Hessian"  # the last resort
LEAST_MEAN = 1e-20  # a Hessian of dead inputs stays zero
ATTEMPTS = 10  # each adds the damping once more
LEAF = 512  # rows of a triangular matrix that are inverted at once


class HessianSum(MatrixSum):
    """Accumulates `XᵀX` of calibration rows in fp32; a GPU multiplies fp16 numbers.

    count: of rows, fp64 () once there are weights.
    """

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs of one calibration row, (t, k), or of several, (rows, t, k)."""
        self.count += len(x) if x.ndim == 3 else 1
        self._add(x.reshape(-1, x.shape[-1]))

    def add_tokens(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Add tokens (n, k) with weights fp32 (n,), each counted as a row."""
        self.count += len(x) if weights is None else weights.sum(dtype=torch.float64)
        self._add(x if weights is None else x * weights.sqrt()[:, None].to(x.dtype))

    def _add(self, x: torch.Tensor) -> None:
        if not len(x):
            return
        if x.is_cuda:
            x = narrowed(x)
            torch.addmm(self.matrix, x.T, x, out_dtype=torch.float32, out=self.matrix)
        else:
            self.matrix.addmm_(x.float().T, x.float())

    def mean(self) -> torch.Tensor:
        """Return `H`, fp32 (k, k), the identity if nothing was added. Consumes the sum."""
        rows = float(self.count)
        if not rows:  # nor a weight
            return torch.eye(len(self.matrix), device=self.matrix.device)
        return self.matrix.div_(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedHessian:
    """A weighted sum of matrices, computed on demand: each can be as large as everything else.

    parts: each matrix fp32 (k, k) in the order of the in-features, its divisor, its multiplier.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor | float, float], ...]

    @classmethod
    def plain(cls, hessian: torch.Tensor) -> Self:
        """Wrap a single matrix."""
        return cls(parts=((hessian, 1.0, 1.0),))

    def diagonal(self) -> torch.Tensor:
        """Return the diagonal, fp32 (k,)."""
        diagonals = [part.diagonal() / mean * share for part, mean, share in self.parts]
        return torch.stack(diagonals).sum(dim=0)

    def in_order(self, perm: torch.Tensor) -> torch.Tensor:
        """Return the sum with rows and columns permuted, fp32 (k, k)."""
        k = len(perm)
        step = max(1, CHUNK_ELEMENTS // k)
        total = torch.zeros(k, k, device=perm.device)
        for part, mean, share in self.parts:
            for begin in range(0, k, step):
                rows = part.index_select(0, perm[begin : begin + step]).index_select(1, perm)
                total[begin : begin + step] += rows.div_(mean).mul_(share)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class DampedHessian:
    """The metric that matrices are rounded in.

    undamped: the Hessian. perm: int64 (k,), in-features by decreasing diagonal. added: the damping,
    absolute.
    """

    undamped: MixedHessian
    perm: torch.Tensor
    added: float

    def matrix(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return it in act-order, (k, k)."""
        ordered = self.undamped.in_order(self.perm).to(dtype)
        ordered.diagonal().add_(self.added)
        return ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianFactor:
    """upper: fp32 (k, k), `U` of `hessian`, which is the identity if nothing else has a factor.

    `remedy` describes what was needed beyond the usual damping, or is empty.
    """

    hessian: DampedHessian
    upper: torch.Tensor
    remedy: str = ""

    @property
    def perm(self) -> torch.Tensor:
        """In-features by decreasing diagonal, int64 (k,)."""
        return self.hessian.perm


def relative_error(
    hessian: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor
) -> torch.Tensor:
    """Return ‖X(W - Q)‖ / ‖XW‖ over the rows X of the Hessian fp32 (k, k); W and Q are (k, n).

    The result is fp32 (), on the device: the host does not wait for it.
    """
    size = squared_norm(hessian, weight)
    error = squared_norm(hessian, weight, less=rounded)
    return (error / size.clamp(min=1e-30)).clamp(min=0).sqrt()


def squared_norm(
    hessian: torch.Tensor, x: torch.Tensor, *, less: torch.Tensor | None = None
) -> torch.Tensor:
    """Return tr(Xᵀ H X) of x (k, n), or of x - less, fp32 ()."""
    total = hessian.new_zeros(())
    for _, part in column_chunks(x, less, step=max(1, CHUNK_ELEMENTS // len(x))):
        total = total + (hessian @ part).mul_(part).sum()
    return total


def column_chunks(
    x: torch.Tensor, less: torch.Tensor | None, *, step: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield chunks of columns of x (m, n), or of x - less, as fp32: a head can be very large.

    `less` may be in main memory.
    """
    for begin in range(0, x.shape[1], step):
        columns = slice(begin, min(begin + step, x.shape[1]))
        part = x[:, columns].float()
        yield columns, part if less is None else part - less[:, columns].to(x.device).float()


def mixed(hessian: torch.Tensor, weighted: torch.Tensor | None, share: float) -> MixedHessian:
    """Return the Hessian to round for, with mean diagonal 1.

    Args:
        hessian: of the inputs, fp32 (k, k).
        weighted: of the inputs weighted by the gradients of the outputs, or None.
        share: weight of `weighted` in the mean of both.
    """
    if weighted is None or share == 0:
        return MixedHessian(parts=((hessian, _mean(hessian), 1.0),))
    weighted = weighted.to(hessian.device)
    parts = (hessian, _mean(hessian), 1 - share), (weighted, _mean(weighted), share)
    return MixedHessian(parts=parts)


def _mean(hessian: torch.Tensor) -> torch.Tensor:
    mean = hessian.diagonal().double().mean()  # a sum in fp32 may overflow
    return mean.clamp(min=LEAST_MEAN)


class Observer(Protocol):
    """Sees some rows that pass a sublayer."""

    def together(self, rows: range) -> Iterator[list[int]]:
        """Yield which of these rows, by number, are seen together."""
        ...

    def add(self, rows: Sequence[int], read: Mapping[str, torch.Tensor]) -> None:
        """Take what projections read of rows, see `Sublayer.reads`."""
        ...


def collect_hessians(
    sublayer: Sublayer,
    states: torch.Tensor,
    *,
    keep: range | None = None,
    move: bool = False,
    observe: Observer | None = None,
    coverage: Coverage | None = None,
    deal: Deal | None = None,
    owners: Mapping[str, int] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Run every row through the unquantized sublayer.

    Args:
        sublayer: with its own weights.
        states: fp32 (rows, t, hidden).
        keep: numbers of rows whose outputs to return; None: all.
        move: whether to overwrite the states with the outputs instead of returning them.
        coverage: of the sublayer, if it has experts.
        observe: sees what projections read of its rows, before the states change.
        deal: whose rows these are; None: they are all there are, and one piece.
        owners: capture → the rank that gets its Hessian; None: rank 0 gets all.

    Returns:
        Capture name → Hessian fp32 (k, k), for the captures that this rank owns; and row number →
        output fp32 (t, hidden).
    """
    passing = _Passing(sublayer, states, keep=keep, move=move, observe=observe, coverage=coverage)
    deal = deal or Deal(len(states), is_whole=True)
    passing.first = deal.own.start
    sums = PieceSums(deal, _no_sums(sublayer, coverage))
    for number, piece in enumerate(deal.pieces):
        for rows in row_batches(sublayer, states, [piece]):
            look()
            passing.run(rows, sums.at(number))
    passing.check.finish(states if move else passing.outputs)
    ranks = deal.ranks
    own = sums.total(lambda capture: _owner(capture, owners))
    hessians = {capture: total.mean() for capture, total in own.items()}
    if coverage and coverage.added and ranks.are_many:
        layer = {LAYER: hessians[LAYER]} if ranks.rank == 0 else None
        hessians |= ranks.bring(layer, 0)
    return coverage.mixed(hessians) if coverage else hessians, passing.outputs


def _owner(capture: str, owners: Mapping[str, int] | None) -> int:
    """Return the rank that gets a Hessian; a sample's goes with what it is mixed into."""
    return 0 if owners is None or capture == LAYER else owners[mixed_into(capture)]


class _Passing:
    """Rows that pass a sublayer, for `collect_hessians`.

    first: the number of the first of the states' rows; outputs: of rows to keep, by number.
    """

    def __init__(
        self,
        sublayer: Sublayer,
        states: torch.Tensor,
        *,
        keep: range | None,
        move: bool,
        observe: Observer | None,
        coverage: Coverage | None,
    ) -> None:
        self.sublayer, self.states, self.keep, self.move = sublayer, states, keep, move
        self.observe, self.coverage, self.first = observe, coverage, 0
        self.outputs: dict[int, torch.Tensor] = {}
        self.check = StatesCheck(sublayer.spec.name)

    def run(self, rows: slice, total: NamedSums[HessianSum]) -> None:
        """Add to the sums what these rows read, and let them pass."""
        sublayer, coverage = self.sublayer, self.coverage
        hidden = self.states[rows].to(device_of(sublayer), non_blocking=True)
        read: Mapping[str, torch.Tensor] = sublayer.reads(hidden)
        numbers = range(self.first + rows.start, self.first + rows.stop)
        if self.observe is not None:
            for seen in self.observe.together(numbers):
                places = [row - numbers.start for row in seen]
                self.observe.add(seen, sublayer.of_rows(hidden, read, places))
        for capture, x in read.items():
            if x.ndim == 3:
                total[capture].add(x)
            else:
                total[capture].add_tokens(x)
        for more in coverage.reads(hidden, numbers.start * hidden.shape[1]) if coverage else ():
            total[more.capture].add_tokens(more.x, more.weights)
        kept = [row for row in numbers if self.keep is None or row in self.keep]
        if not kept:
            return
        if len(kept) < len(numbers):
            places = [row - numbers.start for row in kept]
            read = sublayer.of_rows(hidden, read, places)
            hidden = torch.stack([hidden[place] for place in places])
        output = sublayer.output(hidden, read)
        self.check.add(kept, output)
        if self.move:
            self.states[rows].copy_(output, non_blocking=True)
        else:
            self.outputs |= zip(kept, placed_like(self.states, output), strict=True)


def _no_sums(sublayer: Sublayer, coverage: Coverage | None) -> NamedSums[HessianSum]:
    """Return the sums of all that projections read, and of what coverage adds, over nothing."""
    widths = {**sublayer.spec.widths, **(coverage.widths() if coverage else {})}
    device = device_of(sublayer)
    return NamedSums({c: HessianSum(k, device=device) for c, k in widths.items()})


def head_hessian(head: Head, states: torch.Tensor) -> torch.Tensor:
    """Return the Hessian fp32 (k, k) of the head's inputs, from final states (rows, t, hidden)."""
    hessian = dealt_head_hessian(head, states, Deal(len(states), is_whole=True))
    assert hessian is not None
    return hessian


def dealt_head_hessian(head: Head, states: torch.Tensor, deal: Deal) -> torch.Tensor | None:
    """Return `head_hessian` over the rows of all ranks at rank 0; others receive None.

    Args:
        head: of the model.
        states: final ones of this rank's rows, fp32 (rows, t, hidden).
        deal: of the rows.
    """
    device = head.linear.weight.device
    sums = PieceSums(deal, NamedSums(head=HessianSum(states.shape[-1], device=device)))
    for number, piece in enumerate(deal.pieces):
        for row in states[piece]:
            look()
            sums.at(number)["head"].add(head.normed(row[None].to(device)))
    found = sums.total()
    return found["head"].mean() if found else None


def factor(hessian: MixedHessian, *, damping: float, name: str) -> HessianFactor:
    """Factor a Hessian; apply remedies instead of failing.

    Args:
        hessian: of the inputs.
        damping: added to its diagonal, as a share of the mean diagonal.
        name: the projection, for the log.
    """
    diagonal = hessian.diagonal()
    perm = torch.argsort(diagonal, descending=True, stable=True)
    mean = float(diagonal[perm].double().mean())  # a sum in fp32 may overflow
    for remedy, dtype, added in _attempts(max(damping * mean, LEAST_DAMPING)):
        damped = DampedHessian(undamped=hessian, perm=perm, added=added)
        if remedy == IDENTITY:
            identity = MixedHessian.plain(torch.eye(len(perm), device=perm.device))
            damped = replace(damped, undamped=identity)
        try:
            upper = upper_factor(replace(damped, perm=perm.flip(0)).matrix(dtype))
        except SingularHessian:
            continue
        if remedy:
            log.warning("projection=%s remedy=%s", name, remedy)
        return HessianFactor(hessian=damped, upper=upper, remedy=remedy)
    raise SingularHessian(f"the identity of `{name}` has no Cholesky factor; report this")


def factor_together(
    hessians: Sequence[MixedHessian], *, damping: float, names: Sequence[str]
) -> list[HessianFactor]:
    """Factor Hessians of one size side by side, as `factor` does each; remedies are their own.

    Args:
        hessians: of the inputs.
        damping: as for `factor`.
        names: of the projections, for the log.
    """
    diagonals = torch.stack([hessian.diagonal() for hessian in hessians])
    perms = diagonals.argsort(dim=1, descending=True, stable=True)
    means = diagonals.gather(1, perms).double().mean(dim=1).tolist()
    damped = [
        DampedHessian(undamped=hessian, perm=perm, added=max(damping * mean, LEAST_DAMPING))
        for hessian, perm, mean in zip(hessians, perms, means, strict=True)
    ]
    uppers, are_good = upper_factors([replace(d, perm=d.perm.flip(0)).matrix() for d in damped])
    return [
        HessianFactor(hessian=found, upper=upper)
        if is_good
        else factor(found.undamped, damping=damping, name=name)
        for found, upper, is_good, name in zip(damped, uppers, are_good, names, strict=True)
    ]


def _attempts(damping: float) -> Iterator[tuple[str, torch.dtype, float]]:
    """Yield the remedy to record, the dtype to factor in, and the damping."""
    yield "", torch.float32, damping
    for times in range(2, ATTEMPTS + 1):
        yield f"damping x{times}", torch.float32, times * damping
    yield "fp64 factor", torch.float64, damping
    yield IDENTITY, torch.float32, 0.0


def upper_factor(turned: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a matrix, fp32 (k, k).

    With J the reversal of rows, `J H J = L Lᵀ` gives `H⁻¹ = Uᵀ U` with `U = J L⁻¹ J`: one
    factorization and one triangular inverse; the inverse of `H` itself is never computed.

    Args:
        turned: (k, k), rows and columns in reverse order; freed early if unreferenced elsewhere.

    Raises:
        SingularHessian: a factor does not exist or is not finite.
    """
    transposed, failed = torch.linalg.cholesky_ex(turned, upper=True)  # its rows lie in columns
    del turned
    if failed:
        raise SingularHessian("no Cholesky factor")
    lower = transposed.mT.contiguous()
    del transposed
    with tensor_cores(False):
        invert_lower(lower)
    upper: torch.Tensor = lower.flip(0, 1).float()
    del lower
    largest = torch.linalg.vector_norm(upper, math.inf)  # `isfinite` makes copies of the matrix
    if not largest.isfinite() or not upper.diagonal().all():
        raise SingularHessian("no Cholesky factor")
    return upper


def upper_factors(turned: list[torch.Tensor]) -> tuple[torch.Tensor, list[bool]]:
    """Return what `upper_factor` returns of several matrices, (f, k, k), and which have a factor.

    Args:
        turned: as for `upper_factor`; emptied.
    """
    joined = torch.stack(turned)
    turned.clear()
    by_columns, failed = torch.linalg.cholesky_ex(joined)
    del joined
    lower = by_columns.contiguous()
    del by_columns
    with tensor_cores(False):
        invert_lower(lower)
    upper = lower.flip(1, 2)
    is_whole = upper.isfinite().flatten(1).all(1) & upper.diagonal(dim1=1, dim2=2).all(1)
    are_good: list[bool] = (is_whole & (failed == 0)).tolist()
    return upper, are_good


def invert_lower(lower: torch.Tensor) -> None:
    """Invert lower triangular matrices (…, k, k) in place, by halves whose products are GEMMs."""
    look()
    k = lower.shape[-1]
    if k <= LEAF:
        identity = torch.eye(k, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        return
    half = -(-k // (2 * LEAF)) * LEAF
    first, last = lower[..., :half, :half], lower[..., half:, half:]
    below = lower[..., half:, :half]
    invert_lower(first)
    invert_lower(last)
    below.copy_((last @ below) @ first).neg_()
