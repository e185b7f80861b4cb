"""Memory for the activations that a backward pass needs; what exceeds it is computed again."""

import torch

from exl2flow.core.runtime.memory import limit_of

KEPT_BYTES = 1 << 30
KEPT_SHARE = 0.1  # of a GPU's memory, if that is more


def kept_room(device: torch.device) -> int:
    """Return how many bytes of activations are kept on a device for the backward pass."""
    return kept_in(None if device.type == "cpu" else limit_of(device))


def kept_in(memory: int | None) -> int:
    """Return the same, given the memory of a GPU that tensors may take; None: a CPU."""
    return max(KEPT_BYTES, int(KEPT_SHARE * (memory or 0)))
