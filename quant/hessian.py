"""Hessians of a projection's inputs: accumulated over rows, damped, factored.

`H = Σ XᵀX / rows`. The factor that error feedback needs is the upper Cholesky factor `U` of the
inverse of the damped, act-ordered `H` (`docs/format.md` section 4).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from exl2flow.core.config import RoundingOptions
from exl2flow.core.errors import SingularHessian
from exl2flow.model import Head, Sublayer, narrowed
from exl2flow.quant.source import StatesCheck, device_of

log = logging.getLogger(__name__)

LEAST_DAMPING = 1e-5
IDENTITY = "identity Hessian"  # the last remedy
LEAST_MEAN = 1e-20  # a Hessian of dead inputs stays zero
ROWS_TOGETHER = 4  # that a GPU adds to a Hessian at a time
CHUNK_ELEMENTS = 1 << 26  # of a wide matrix that are looked at together
ATTEMPTS = 10  # each adds the damping once more


class HessianSum:
    """Accumulates `XᵀX` in fp32, one calibration row at a time.

    A GPU multiplies fp16 numbers, some rows at a time: writing a large sum takes long.
    """

    def __init__(self, k: int, *, device: torch.device | str = "cpu") -> None:
        self._sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._rows = 0
        self._waiting: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs of one calibration row, (..., k)."""
        flat = x.reshape(-1, x.shape[-1])  # (t, k)
        self._rows += 1
        if not x.is_cuda:
            self._sum.addmm_(flat.float().T, flat.float())
            return
        self._waiting.append(narrowed(flat))
        if len(self._waiting) == ROWS_TOGETHER:
            self._add_waiting()

    def mean(self) -> torch.Tensor:
        """Return `H`, fp32 (k, k); the identity when nothing was added."""
        if not self._rows:
            return torch.eye(len(self._sum), device=self._sum.device)
        self._add_waiting()
        return self._sum / self._rows

    def _add_waiting(self) -> None:
        if self._waiting:
            x = torch.cat(self._waiting)
            torch.addmm(self._sum, x.T, x, out_dtype=torch.float32, out=self._sum)
            self._waiting.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianFactor:
    """perm: int64 (k,), in-features by falling diagonal; upper: fp32 (k, k); hessian: fp32 (k, k).

    `hessian` keeps the order of the in-features and is not damped; the identity stands for one that
    has no factor. `added` is the damping in absolute terms. `remedy` says what was done beside the
    ordinary damping, or is empty.
    """

    perm: torch.Tensor
    upper: torch.Tensor
    hessian: torch.Tensor
    added: float
    remedy: str = ""

    def damped(self) -> torch.Tensor:
        """Return the damped Hessian in act-order, fp32 (k, k)."""
        ordered = in_order(self.hessian, self.perm)
        ordered.diagonal().add_(self.added)
        return ordered


def in_order(hessian: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Return a Hessian fp32 (k, k) with rows and columns permuted."""
    return hessian[perm[:, None], perm]


def relative_error(
    hessian: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor
) -> torch.Tensor:
    """Return ‖X(W - Q)‖ / ‖XW‖ over the rows that H fp32 (k, k) is of; W and Q (k, n).

    The result is fp32 (), on the device: nothing waits for it.
    """
    size = squared_norm(hessian, weight)
    return (squared_norm(hessian, weight - rounded) / size.clamp(min=1e-30)).clamp(min=0).sqrt()


def squared_norm(hessian: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return tr(Xᵀ H X) of x fp32 (k, n), fp32 ()."""
    total = hessian.new_zeros(())
    for part in torch.split(x, max(1, CHUNK_ELEMENTS // len(x)), dim=1):
        total = total + (hessian @ part).mul_(part).sum()
    return total


def mixed(hessian: torch.Tensor, weighted: torch.Tensor | None, share: float) -> torch.Tensor:
    """Return the Hessian that is rounded for, of mean diagonal 1, fp32 (k, k).

    Args:
        hessian: of the inputs.
        weighted: of the inputs weighted by the gradients of the outputs, or None.
        share: of `weighted` in the mean of both.
    """
    total = _normalized(hessian)
    if weighted is not None and share > 0:
        total.lerp_(_normalized(weighted.to(hessian.device)), share)
    return total


def _normalized(hessian: torch.Tensor) -> torch.Tensor:
    mean = hessian.diagonal().double().mean()  # a sum in fp32 may overflow
    return (hessian / mean.clamp(min=LEAST_MEAN)).float()


def collect_hessians(
    sublayer: Sublayer,
    states: torch.Tensor,
    *,
    keep: range | None = None,
    observe: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
    """Run every row through the unquantized sublayer.

    Args:
        sublayer: with its own weights.
        states: fp32 (rows, t, hidden), not changed.
        keep: rows whose outputs are wanted; all when None.
        observe: is given each row's number and, by capture, what is read of it, (1, t, k).

    Returns:
        Capture name → Hessian fp32 (k, k), and row → output fp32 (t, hidden).
    """
    sums: dict[str, HessianSum] = {}
    outputs: dict[int, torch.Tensor] = {}
    check = StatesCheck(sublayer.spec.name)
    for row in range(len(states)):
        hidden = states[row : row + 1].to(device_of(sublayer), non_blocking=True)
        normed = sublayer.normed(hidden)
        inner = sublayer.inner(normed)
        read = {"input": normed, "inner": inner}
        if observe is not None:
            observe(row, read)
        for capture, x in read.items():
            if capture not in sums:
                sums[capture] = HessianSum(x.shape[-1], device=x.device)
            sums[capture].add(x)
        if keep is None or row in keep:
            output = sublayer.output(hidden, inner)[0]
            check.add(row, output)
            outputs[row] = output.to(states.device)
    check.finish(outputs)
    return {capture: total.mean() for capture, total in sums.items()}, outputs


def head_hessian(head: Head, states: torch.Tensor) -> torch.Tensor:
    """Return the Hessian of what the head reads of final states (rows, t, hidden), fp32 (k, k)."""
    device = head.linear.weight.device
    total = HessianSum(states.shape[-1], device=device)
    for row in states:
        total.add(head.normed(row[None].to(device)))
    return total.mean()


def shared_factor(
    hessian: torch.Tensor,
    weighted: torch.Tensor | None,
    options: RoundingOptions,
    *,
    name: str,
    note: Callable[[str], None] = lambda text: None,
) -> HessianFactor:
    """Factor the Hessian that all projections which read one activation are rounded for.

    Args:
        hessian: of what they read, fp32 (k, k).
        weighted: the same, weighted by the gradients of the outputs, or None.
        options: of rounding.
        name: what they read, for the log.
        note: records what had to be done for the factor to exist.
    """
    blend = mixed(hessian, weighted, options.fisher_share)
    item = factor(blend, damping=options.damping, name=name)
    if item.remedy:
        note(f"{name}: {item.remedy}")
    return item


def factor(hessian: torch.Tensor, *, damping: float, name: str) -> HessianFactor:
    """Factor a Hessian, with remedies in place of a dead run.

    Args:
        hessian: fp32 (k, k).
        damping: added to its diagonal, as a share of the mean diagonal.
        name: the projection, for the log.
    """
    perm = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    mean = float(hessian.diagonal()[perm].double().mean())  # a sum in fp32 may overflow
    for remedy, kind, added in _attempts(max(damping * mean, LEAST_DAMPING)):
        try:
            upper = upper_factor(_damped(hessian, perm, kind, added))
        except SingularHessian:
            continue
        if remedy:
            log.warning("projection=%s remedy=%s", name, remedy)
        usable = torch.eye(len(perm), device=perm.device) if remedy == IDENTITY else hessian
        return HessianFactor(perm=perm, upper=upper, hessian=usable, added=added, remedy=remedy)
    raise SingularHessian(f"the identity of `{name}` has no Cholesky factor; report this")


def _attempts(damping: float) -> Iterator[tuple[str, torch.dtype | None, float]]:
    """Yield what to record, the dtype to factor in (None: the identity), and the damping."""
    yield "", torch.float32, damping
    for times in range(2, ATTEMPTS + 1):
        yield f"damping x{times}", torch.float32, times * damping
    yield "fp64 factor", torch.float64, damping
    yield IDENTITY, None, 0.0


def _damped(
    hessian: torch.Tensor, perm: torch.Tensor, dtype: torch.dtype | None, damping: float
) -> torch.Tensor:
    """Return what is factored: a matrix of its own, for a Hessian can be as large as all else."""
    if dtype is None:
        return torch.eye(len(perm), device=perm.device)
    ordered = in_order(hessian, perm).to(dtype)
    ordered.diagonal().add_(damping)
    return ordered


def upper_factor(matrix: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a matrix (k, k), fp32.

    A matrix that nobody else refers to is freed on the way.

    Raises:
        SingularHessian: a factor does not exist or is not finite.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix)
    del matrix
    if not failed:
        inverse = torch.cholesky_inverse(lower)
        del lower
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        del inverse
    if failed or not upper.isfinite().all():
        raise SingularHessian("no Cholesky factor")
    factored: torch.Tensor = upper.float()
    return factored.contiguous()
