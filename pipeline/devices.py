"""The device of a run, and how torch allocates memory on it."""

import os

import torch

from exl2flow.core.options.comparison import Comparison
from exl2flow.core.options.config import RunOptions
from exl2flow.engine.loading.layer_split import check_split
from exl2flow.kernels import resolve_device as resolve_device

# The first avoids fragmentation of GPU memory; the others pin gigabytes without taking seconds
ALLOCATOR = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)


def choose_allocator() -> None:
    """Configure torch's GPU allocator unless the user has. Call before CUDA is initialized."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)


def checked_device(config: RunOptions | Comparison) -> torch.device:
    """Return the device of a run, whose other GPUs exist if it splits models.

    Raises:
        ConfigError: a device is not there, or is not a GPU.
    """
    device = resolve_device(config.device)
    check_split(config, device)
    return device
