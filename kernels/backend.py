"""Choose a device and the implementation of `Ops` for it.

CuPy is imported only when a CUDA device is requested, so everything else runs without it.
"""

import torch

from exl2flow.core.errors import BackendUnavailable
from exl2flow.kernels.ops import Ops
from exl2flow.kernels.torch_ops import TORCH_OPS


def resolve_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        BackendUnavailable: CUDA is requested but torch finds no device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(
            "no CUDA device is visible to torch; check the driver and that a CUDA build of torch "
            "is installed, or use `--device cpu`"
        )
    return torch.device(name)


def get_ops(device: torch.device | str) -> Ops:
    """Return the implementation for a device.

    Raises:
        BackendUnavailable: the device needs CuPy, which is not installed.
    """
    if torch.device(device).type == "cpu":
        return TORCH_OPS
    try:
        from exl2flow.kernels.cuda_ops import CUDA_OPS
    except ImportError as error:
        raise BackendUnavailable(
            f"the kernels for `{device}` need CuPy ({error}): install `exl2flow[cuda13]` or "
            "`exl2flow[cuda12]`, whichever your driver supports, or use `--device cpu`"
        ) from error
    return CUDA_OPS
