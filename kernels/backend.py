"""Choose a device, the implementation of `Ops` for it, and the precision of its products.

CuPy is imported only when a CUDA device is requested, so everything else runs without it.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from exl2flow.core.device_name import device_name, index_of
from exl2flow.core.errors import BackendUnavailable, ConfigError
from exl2flow.core.installing import install
from exl2flow.kernels.reference.ops import TORCH_OPS, Ops
from exl2flow.kernels.streams import runs_beside

log = logging.getLogger(__name__)

LEAST_NVRTC = (12, 4)  # earlier ones refuse some sources, 12.0 ends the process
OTHERWISE = ", or use `--device cpu`"  # how errors end


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda`, or `cuda:1` and the like.

    Raises:
        ConfigError: it is not a device's name.
        BackendUnavailable: CUDA is requested but torch finds no device, or not that one, or the
            kernels cannot be used. `auto` takes the CPU then, and a warning says why.
    """
    try:
        name = device_name(name)
    except ValueError as error:
        raise ConfigError(f"the device is `{name}`: {error}") from None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and unused_gpu() is None else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BackendUnavailable(
            "no CUDA device is visible to torch; check the driver and that a CUDA build of torch "
            'is installed, or compute on the CPU: `--device cpu`, in Python `device="cpu"`'
        )
    index, count = index_of(name), torch.cuda.device_count()
    if index is not None and index >= count:
        names = "`cuda:0`" if count == 1 else f"`cuda:0` to `cuda:{count - 1}`"
        raise BackendUnavailable(f"no device `{name}`: torch sees {names}; give one")
    if name.startswith("cuda"):
        _cuda_ops()
    return torch.device(name)


@cache
def unused_gpu() -> str | None:
    """Return why `auto` takes the CPU although there is a GPU, and what to do; None if it does not.

    The first call in a process warns.
    """
    if not torch.cuda.is_available():
        return None
    try:
        _cuda_ops()
    except BackendUnavailable as error:
        reason = f"the GPU is not used: {str(error).removesuffix(OTHERWISE)}"
        log.warning("%s", reason)
        return reason
    return None


def get_ops(device: torch.device | str) -> Ops:
    """Return the implementation for a device.

    Raises:
        BackendUnavailable: the device needs CuPy, which is not installed, or finds a compiler that
            is too old.
    """
    return TORCH_OPS if torch.device(device).type == "cpu" else _cuda_ops()


@cache
def _cuda_ops() -> Ops:
    try:
        from exl2flow.kernels.cuda.ops import CUDA_OPS
        from exl2flow.kernels.cuda.ptx import nvrtc_version
    except ImportError as error:
        raise BackendUnavailable(
            f"the kernels need CuPy ({error}): `{install(['cupy-cuda13x>=14'])}`, or "
            f"`cupy-cuda12x` in its place, whichever your driver supports{OTHERWISE}"
        ) from error
    if (found := nvrtc_version()) < LEAST_NVRTC:
        least, names = ".".join(map(str, LEAST_NVRTC)), ".".join(map(str, found))
        raise BackendUnavailable(
            f"the kernels need NVRTC {least} or later, and CuPy finds {names}: install a newer "
            f"CUDA toolkit, or `{install([f'nvidia-cuda-nvrtc-cu12>={least}'])}`{OTHERWISE}"
        )
    return CUDA_OPS


_switching = threading.Lock()
_blocks: dict[object, bool] = {}  # active `tensor_cores` blocks, after the setting before them


@contextmanager
def tensor_cores(use: bool = True) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 products on a GPU: fp16 and bf16 weights lose nothing.

    The switch belongs to the process. Where blocks of several threads overlap, the one begun
    last decides, and the last to end restores the earlier setting. Stages on a GPU never overlap
    (`core.runtime.device_locks.turn`), and work of a stage that runs concurrently may not switch,
    so timing changes no result (`docs/concepts/gpu.md`).

    Raises:
        RuntimeError: work that runs concurrently switches.
    """
    block = object()
    with _switching:
        if runs_beside.get() and use != torch.backends.cuda.matmul.allow_tf32:
            raise RuntimeError("work that runs concurrently may not switch TF32; do it before")
        _blocks.setdefault("before", torch.backends.cuda.matmul.allow_tf32)
        _blocks[block] = use
        torch.backends.cuda.matmul.allow_tf32 = use
    try:
        yield
    finally:
        with _switching:
            del _blocks[block]
            torch.backends.cuda.matmul.allow_tf32 = list(_blocks.values())[-1]
            if len(_blocks) == 1:
                _blocks.clear()
