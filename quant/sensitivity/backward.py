"""Gradients through one sublayer or the head, row by row, and the sums that they add to.

The loss is the cross-entropy of labels drawn from the model itself, whose gradients give the Fisher
information. Labels come from uniform numbers of a CPU generator, one per token, through the inverse
of the cumulative probabilities: devices draw the same labels up to rounding.
"""

import torch

from exl2flow.core.errors import NonFiniteState
from exl2flow.core.runtime.interrupt import look
from exl2flow.model import Head, Linear, Sublayer
from exl2flow.quant.sensitivity.fisher import FactorSum, Sums
from exl2flow.quant.walk.source_model import device_of, non_finite_share

LOGIT_ELEMENTS = 1 << 26  # logits held at a time; 256 MiB


class Tap:
    """A linear map that remembers its last input and output."""

    def __init__(self, linear: Linear) -> None:
        self.weight = linear.weight
        self.bias = linear.bias
        self._linear = linear
        self.read = self.put = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map (…, k) to (…, n)."""
        self.read = x.detach()
        self.put = self._linear(x)
        return self.put


def sublayer_backward(
    sublayer: Sublayer, states: torch.Tensor, gradient: torch.Tensor, sums: Sums
) -> None:
    """Propagate gradients from a sublayer's output to its input, row by row; see `check_gradients`.

    Args:
        sublayer: its linears are taps meanwhile.
        states: fp32 (rows, t, hidden), entering the sublayer.
        gradient: fp32 (rows, t, hidden), with respect to its output; overwritten with the gradient
            with respect to its input.
        sums: projection → sums that receive inputs and output gradients; may lack projections.
    """
    device = device_of(sublayer)
    untapped = dict(sublayer.linears)
    taps = {name: Tap(linear) for name, linear in untapped.items()}
    sublayer.linears.update(taps)
    for row in range(len(states)):
        look()
        hidden = states[row : row + 1].detach().clone().to(device).requires_grad_()
        with torch.enable_grad():
            output = sublayer(hidden)
            outputs = [tap.put for tap in taps.values()]
            pull = (output * gradient[row : row + 1].to(device)).sum()
            gradients = torch.autograd.grad(pull, [hidden, *outputs])
        for (name, tap), by_output in zip(taps.items(), gradients[1:], strict=True):
            if name in sums:
                sums[name].add(*(x.flatten(0, -2).float() for x in (tap.read, by_output)))
        # last, because the gradient of an output may share its memory
        gradient[row] = gradients[0][0]
    sublayer.linears.update(untapped)


def drawn(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Return the numbers in [0, 1) that choose the labels of all rows, (rows, tokens)."""
    return torch.rand(rows, tokens, generator=torch.Generator().manual_seed(seed))


def head_backward(
    head: Head, states: torch.Tensor, uniform: torch.Tensor, sums: FactorSum | None
) -> torch.Tensor:
    """Return the gradient by the final states, fp32 (rows, t, hidden), on their device.

    The head's own factors need no sampled labels: over all labels, `Σ p g gᵀ = diag(p) - p pᵀ`,
    with a soft-cap, whose derivative is d, `diag(p d²) - (p d)(p d)ᵀ`.

    Args:
        head: final norm and projection.
        states: fp32 (rows, t, hidden), unchanged.
        uniform: of these rows, see `drawn`.
        sums: receives the head's factors.
    """
    device = head.linear.weight.device
    gradient = torch.empty_like(states)
    for row in range(len(states)):
        hidden = states[row].detach().clone().to(device).requires_grad_()
        with torch.enable_grad():
            normed = head.normed(hidden)
            by_normed = _by_normed(head, normed.detach(), uniform[row].to(device), sums)
            gradient[row] = torch.autograd.grad((normed * by_normed).sum(), hidden)[0]
    return gradient


def _by_normed(
    head: Head, normed: torch.Tensor, uniform: torch.Tensor, sums: FactorSum | None
) -> torch.Tensor:
    """Return the gradient with respect to the inputs (t, k) of the head's projection.

    Args:
        head: of the projection.
        normed: its inputs, fp32 (t, k).
        uniform: numbers in [0, 1) that choose the labels, (t,).
        sums: receives the head's factors.
    """
    result = torch.empty_like(normed)
    weight = head.linear.weight
    step = max(1, LOGIT_ELEMENTS // len(weight))
    for begin in range(0, len(normed), step):
        look()
        part = slice(begin, begin + step)
        logits = head.logits(normed[part])
        p = torch.softmax(logits, dim=-1)  # (t, v)
        slope = None if head.softcap is None else 1 - (logits / head.softcap).square()
        del logits
        if sums is not None:
            _add_all_labels(sums, normed[part], p, slope)
        labels = draw(p, uniform[part])
        p.scatter_add_(1, labels[:, None], torch.full_like(p[:, :1], -1.0))
        result[part] = (p if slope is None else p * slope) @ weight
    return result


def _add_all_labels(
    sums: FactorSum, normed: torch.Tensor, p: torch.Tensor, slope: torch.Tensor | None
) -> None:
    """Add the head's factors for tokens with probabilities (t, v); see `head_backward`."""
    scaled = p if slope is None else p * slope
    squared = p if slope is None else scaled * slope
    trace = 1.0 if slope is None else squared.sum(-1)
    sums.add_input(normed, trace - scaled.square().sum(-1))
    sums.add_diagonal(squared.sum(0))
    sums.add_products(scaled, sign=-1)


def draw(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return a label per token, int64 (t,), from probabilities (t, v) and numbers in [0, 1) (t,).

    The label is the first one whose cumulative probability exceeds the number.
    """
    cumulated = p.cumsum(-1)
    wanted = uniform[:, None] * cumulated[:, -1:]  # the sum is not quite 1
    labels = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return labels.clamp_(max=p.shape[-1] - 1)


def check_gradients(gradients: torch.Tensor, *, where: str, first: int = 0) -> None:
    """Reject NaN and infinity; waits for the device.

    Args:
        gradients: fp32 (rows, t, hidden).
        where: the part that they entered last.
        first: number of the first row.

    Raises:
        NonFiniteState: naming the part and the row.
    """
    if not len(gradients):
        return
    finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).tolist()
    if not all(finite):
        row = finite.index(False)
        raise NonFiniteState(
            f"gradients before `{where}` hold NaN or infinity in "
            f"{non_finite_share(gradients[row])} of row {first + row}; try other calibration "
            "data, or set the sensitivity's kind to `error`"
        )
