"""Norms as models have them: loaded, and applied to hidden states."""

from typing import Literal

import torch

from exl2flow import kernels
from exl2flow.model.config.sublayer_spec import NormSpec
from exl2flow.model.files.weights import TensorFiles
from exl2flow.model.layers.linear import moved, other_shape


class Norm(kernels.NormArgs):
    """A `kernels.NormArgs` that is called on what it normalizes."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (…, d), or (…, heads, t, d) with weights of heads, in the dtype of `x`."""
        return kernels.get_ops(x.device).norm(x, self)


def load_norm(
    tensors: TensorFiles, spec: NormSpec, *, dtype: torch.dtype, device: torch.device | str
) -> Norm:
    """Load a norm; a stored (heads, d) must repeat one row where the norm has a weight (d,).

    The weight in memory is (stored weight + offset) · multiplier in fp32, then in `dtype`.

    Raises:
        MissingTensor: its weight, or the bias that it has, is absent.
        TensorShapeError: one of them has another shape.
    """
    weight = in_memory(read_norm(tensors, spec, "weight"), spec.offset, spec.multiplier)
    bias = None
    if spec.has_bias:
        bias = in_memory(read_norm(tensors, spec, "bias"), 0.0, spec.multiplier)
    return Norm(
        weight=moved(weight, device, dtype),
        bias=None if bias is None else moved(bias, device, dtype),
        eps=spec.eps,
        centered=spec.centered,
    )


def in_memory(stored: torch.Tensor, offset: float, multiplier: float) -> torch.Tensor:
    """Return (stored + offset) · multiplier, in fp32 unless nothing changes."""
    weight = stored.float() + offset if offset else stored
    return weight if multiplier == 1.0 else weight.float() * multiplier


def read_norm(
    tensors: TensorFiles, spec: NormSpec, part: Literal["weight", "bias"]
) -> torch.Tensor:
    """Read a norm's tensor as it is stored; see `load_norm`."""
    name = f"{spec.key}.{part}"
    stored = tensors.read_floating(name)
    is_per_head = stored.dim() == 2 and stored.shape[1:] == spec.shape
    if is_per_head and bool((stored == stored[0]).all()):
        stored = stored[0]  # writers may expand a norm of heads, docs/format.md
    if stored.shape != spec.shape:
        raise other_shape(name, stored.shape, spec.shape)
    return stored
