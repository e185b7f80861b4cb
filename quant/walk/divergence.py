"""KL divergence between the predictions of two heads, a few hundred positions at a time."""

import torch

from exl2flow.core.runtime.interrupt import look
from exl2flow.model import Head
from exl2flow.model.layers.decoder import divergence_terms

LOGIT_POSITIONS = 256  # whose logits are held at a time
LOGITS = 6  # copies of them: both models', their logarithms, differences


def logit_bytes(tokens: int, vocab_size: int) -> int:
    """Return the memory in bytes that comparing two heads on rows of `tokens` tokens needs."""
    return LOGITS * torch.float32.itemsize * min(tokens, LOGIT_POSITIONS) * vocab_size


def mean_divergence(
    reference: Head, expected: torch.Tensor, head: Head, found: torch.Tensor
) -> float:
    """Return the mean over rows of `row_divergences`."""
    rows = row_divergences(reference, expected, head, found)
    return sum(rows) / len(rows)


def row_divergences(
    reference: Head, expected: torch.Tensor, head: Head, found: torch.Tensor
) -> list[float]:
    """Return the KL divergence in nats of predictions from final states, by row.

    Args:
        reference: head of the source.
        expected: final states of the source, fp32 (rows, t, hidden).
        head: the head to compare.
        found: the final states that it reads, fp32 (rows, t, hidden).
    """
    device = reference.linear.weight.device
    return [
        divergence(
            reference,
            reference.normed(x[None].to(device))[0],
            head,
            head.normed(y[None].to(device))[0],
        )
        for x, y in zip(expected, found, strict=True)
    ]


def divergence(reference: Head, expected: torch.Tensor, head: Head, found: torch.Tensor) -> float:
    """Return `Σ p ln(p / q)` in nats, the mean over positions.

    Args:
        reference: head of the source.
        expected: what its projection reads, (t, hidden).
        head: the head to compare.
        found: what its projection reads, (t, hidden).
    """
    total = 0.0
    pairs = zip(
        torch.split(expected, LOGIT_POSITIONS), torch.split(found, LOGIT_POSITIONS), strict=True
    )
    for x, y in pairs:
        look()
        p = torch.log_softmax(reference.logits(x), dim=-1)
        q = torch.log_softmax(head.logits(y), dim=-1)
        total += float(divergence_terms(p, q).sum())
    return max(0.0, total / len(expected))
