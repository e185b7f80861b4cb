"""Activation functions of products.

Kernels number those of `ACTIVATIONS` in this order. The others are steps between products: no
product computes them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

Activation = Callable[[torch.Tensor], torch.Tensor]
GatedActivation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of gate and up

SWIGLU_LIMIT = 7.0  # of a clamped gate, and of the size of a clamped up
SWIGLU_SLOPE = 1.702

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return (u + 1) · g · σ(slope · g) of clamped g and u, in fp32 rounded once to their dtype.

    g = min(gate, limit), u = up within ± limit.
    """
    g, u = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((u + 1) * (g * torch.sigmoid(g * SWIGLU_SLOPE))).to(gate.dtype)


GATED_ACTIVATIONS: dict[str, GatedActivation] = {"clamped_swiglu": clamped_swiglu}
