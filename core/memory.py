"""How much memory there is, and how much of a GPU may be used."""

import sys
from pathlib import Path

import torch

BESIDE_TENSORS = 2**30  # about what CUDA, libraries and kernels take of a GPU
WORKSPACE_SHARE = 0.04  # of a limit: workspaces that libraries allocate later

_limits: dict[torch.device, int] = {}  # device → bytes that tensors may take


def limit_memory(device: torch.device, most: int | None) -> None:
    """Limit this process to `most` bytes of a GPU, everything included; None removes the limit."""
    if device.type == "cpu":
        return
    own = _indexed(device)
    _, total = torch.cuda.mem_get_info(own)
    used = total if most is None else min(most, total)
    _limits[own] = max(0, int(used * (1 - WORKSPACE_SHARE)) - BESIDE_TENSORS)
    torch.cuda.set_per_process_memory_fraction(_limits[own] / total, own)


def limit_of(device: torch.device) -> int:
    """Return how many bytes of a GPU the tensors of this process may take in total.

    For a CPU, return a number that nothing reaches.
    """
    if device.type == "cpu":
        return sys.maxsize
    _, total = torch.cuda.mem_get_info(device)
    return _limits.get(_indexed(device), total)


def free_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU may still be used, including what torch holds for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return min(free + torch.cuda.memory_reserved(device) - used, limit_of(device) - used)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0)


def available_memory() -> int | None:
    """Return the operating system's estimate of available memory; None if it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
