"""The torch implementation of the steps between products: the specification of `cuda_steps.py`."""

import torch

from exl2flow.kernels.activations import ACTIVATIONS


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `Ops.gated`."""
    return ACTIVATIONS[activation](gate) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `Ops.rotate`."""
    half = cos.shape[-1]
    wide = x[..., : 2 * half].float()
    first, second = wide[..., :half], wide[..., half:]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    rest = x[..., 2 * half :]
    found = rotated.to(x.dtype)
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found
