"""Root-mean-square normalization."""

from dataclasses import dataclass

import torch

from exl2flow.core.errors import TensorShapeError
from exl2flow.kernels import get_ops
from exl2flow.model.linear import moved
from exl2flow.model.weights import TensorFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """y = x / sqrt(mean(x²) + eps) · weight over the last axis, the division in fp32."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (…, d); the result has the dtype of `x`."""
        return get_ops(x.device).rms_norm(x, self.weight, self.eps)


def load_norm(
    tensors: TensorFiles,
    key: str,
    *,
    size: int,
    eps: float,
    dtype: torch.dtype,
    device: torch.device | str,
) -> RmsNorm:
    """Load the norm `key` over `size` features; a stored (heads, size) must repeat one row.

    Raises:
        MissingTensor: its weight is absent.
        TensorShapeError: its weight has another size.
    """
    name = f"{key}.weight"
    weight = tensors.read_floating(name)
    if weight.dim() == 2 and weight.shape[1] == size and bool((weight == weight[0]).all()):
        weight = weight[0]  # writers may expand a norm of heads, docs/format.md
    if weight.shape != (size,):
        raise TensorShapeError(
            f"`{name}` has shape {tuple(weight.shape)}, `config.json` implies {(size,)}; "
            "check that both belong to one model"
        )
    return RmsNorm(weight=moved(weight, device, dtype), eps=eps)
