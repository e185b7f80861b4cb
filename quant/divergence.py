"""KL divergence between two heads' predictions, a few hundred positions at a time."""

import torch

from exl2flow.model import Linear

LOGIT_POSITIONS = 256  # logits exist for that many positions at a time


def divergence(
    reference: Linear, expected: torch.Tensor, linear: Linear, found: torch.Tensor
) -> float:
    """Return `Σ p ln(p / q)` in nats, the mean over positions.

    Args:
        reference: head of the source.
        expected: what it reads, (t, hidden).
        linear: head that is compared.
        found: what that reads, (t, hidden).
    """
    total = 0.0
    pairs = zip(
        torch.split(expected, LOGIT_POSITIONS), torch.split(found, LOGIT_POSITIONS), strict=True
    )
    for x, y in pairs:
        p = torch.log_softmax(reference(x).float(), dim=-1)
        q = torch.log_softmax(linear(y).float(), dim=-1)
        total += float((p.exp() * (p - q)).sum())
    return max(0.0, total / len(expected))
