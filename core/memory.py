"""How much memory there is, and how much of a GPU's may be used."""

import sys
from pathlib import Path

import torch

BESIDE_TENSORS = 2**30  # of a GPU: CUDA itself, libraries, kernels; about
WORKSPACE_SHARE = 0.04  # of a limit: what libraries take as they work

_limits: dict[torch.device, int] = {}  # bytes of tensors, of devices whose use is limited


def usable(most: int) -> int:
    """Return how many bytes tensors may take when a process may use `most` of a GPU."""
    return max(0, int(most * (1 - WORKSPACE_SHARE)) - BESIDE_TENSORS)


def limit_memory(device: torch.device, most: int | None) -> None:
    """Let this process use at most so many bytes of a GPU, all included; None: all there is."""
    if device.type == "cpu":
        return
    own = _indexed(device)
    _, total = torch.cuda.mem_get_info(own)
    _limits[own] = usable(total if most is None else min(most, total))
    torch.cuda.set_per_process_memory_fraction(_limits[own] / total, own)


def limit_of(device: torch.device) -> int:
    """Return how many bytes of a GPU the tensors of this process may take in all.

    Of a CPU it is not known: it has a limit that nothing reaches.
    """
    if device.type == "cpu":
        return sys.maxsize
    _, total = torch.cuda.mem_get_info(device)
    return _limits.get(_indexed(device), total)


def free_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU may still be used, what is reserved for reuse included."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return min(free + torch.cuda.memory_reserved(device) - used, limit_of(device) - used)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0)


def available_memory() -> int | None:
    """Return the kernel's estimate of memory that can be used, or None where it gives none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
