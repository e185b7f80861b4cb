"""Available host memory, and the GPU memory that may be used."""

import math
import sys
from pathlib import Path

import torch

BESIDE_TENSORS = 2**30  # bytes of a GPU for CUDA itself, libraries and kernels; approximate
WORKSPACE_SHARE = 0.04  # of a limit: workspace of libraries

_limits: dict[torch.device, int] = {}  # device → bytes of tensors, if its use is limited


def usable(limit: int) -> int:
    """Return how many bytes tensors may take when a process may use `limit` of a GPU."""
    return max(0, int(limit * (1 - WORKSPACE_SHARE)) - BESIDE_TENSORS)


def limit_for(tensors: int) -> int:
    """Return the smallest memory limit that leaves `tensors` bytes of a GPU to tensors."""
    return math.ceil((tensors + BESIDE_TENSORS) / (1 - WORKSPACE_SHARE)) + 1


def limit_memory(device: torch.device, limit: int | None) -> None:
    """Limit this process to `limit` bytes of a GPU, all included; None: no limit."""
    if device.type == "cpu":
        return
    gpu = _indexed(device)
    _, total = torch.cuda.mem_get_info(gpu)
    _limits[gpu] = usable(total if limit is None else min(limit, total))
    torch.cuda.set_per_process_memory_fraction(_limits[gpu] / total, gpu)


def limit_of(device: torch.device) -> int:
    """Return how many bytes the tensors of this process may take on a GPU in total.

    The limit of a CPU is unknown; the value returned for it is never reached.
    """
    if device.type == "cpu":
        return sys.maxsize
    _, total = torch.cuda.mem_get_info(device)
    return _limits.get(_indexed(device), total)


def free_memory(device: torch.device) -> int:
    """Return how many bytes of a GPU are still free, including the allocator's reserve."""
    free, _ = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    return min(free + torch.cuda.memory_reserved(device) - used, limit_of(device) - used)


def pinned_block(count: int) -> int:
    """Return how many bytes of main memory torch pins for a tensor of `count` bytes."""
    return 1 << max(0, count - 1).bit_length()


def give_back_pinned() -> None:
    """Free the pinned memory that nothing uses, if less than half of main memory is available.

    torch keeps it for later, and pinning takes a second per GB.
    """
    if (available_memory() or 0) > _memory_fields().get("MemTotal", 0) / 2:
        return
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if torch.cuda.is_available():
        (empty or getattr(torch._C, "_host_emptyCache"))()  # noqa: B009  # torch before 2.12


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0)


def available_memory() -> int | None:
    """Return the kernel's estimate of available main memory, None where there is none."""
    return _memory_fields().get("MemAvailable")


def total_memory(device: torch.device) -> float:
    """Return the bytes of a device's memory, used or not; without end where nothing tells."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(_memory_fields().get("MemTotal", math.inf))


def _memory_fields() -> dict[str, int]:
    """Return what the kernel tells of main memory, in bytes; empty where it tells nothing."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.replace(":", "").split() for line in lines)
    return {name: int(count) * 1024 for name, count, *_ in fields}
