"""Compile the functions of the CUDA sources in `csrc/` on first use, and launch them.

CuPy compiles with NVRTC for the current device and caches the result on disk; for another
architecture, `ptx.py` does.
"""

import ctypes
import logging
import re
import sys
import threading
from functools import cache

import cupy
import numpy as np
import torch

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.environment import virtual_architecture
from exl2flow.kernels.cuda.ptx import cubin_file, ptx_file
from exl2flow.kernels.interface import sampling
from exl2flow.kernels.interface.activations import ACTIVATIONS, SWIGLU_LIMIT, SWIGLU_SLOPE
from exl2flow.kernels.interface.cache_formats import PAGE_TOKENS, STEP_TOKENS, Element
from exl2flow.kernels.interface.delta import CHUNK_TOKENS, RING
from exl2flow.kernels.interface.groups import MOST_COLUMNS, PANEL_ROWS, SCALE_LEVELS
from exl2flow.kernels.interface.packed import BLOCK_PANELS, TILE
from exl2flow.kernels.interface.router import Scores
from exl2flow.kernels.plans import batched, experts, product, shares
from exl2flow.kernels.plans.sources import source
from exl2flow.kernels.reference import delta as torch_delta
from exl2flow.kernels.reference import descent as torch_descent
from exl2flow.kernels.reference import ops as torch_ops
from exl2flow.kernels.reference import refit as torch_refit
from exl2flow.kernels.reference import sampler as torch_sampler

THREADS = 128  # per CTA, with one column per thread
WORD, MOST_ARGUMENTS = 8, 24  # bytes of a kernel's argument that is not a struct; arguments
ATTENTION_WARPS = 8  # most warps of an attention CTA
ATTENTION_STEP = 12 << 10  # most bytes for a warp to take 32 positions at a time; else it takes 16
ROW_PAD, LONG_ROW_PAD = 16, 48  # bytes after a key or value in shared memory; of over 256 elements
DECODE_WARPS, DECODE_TILES = 4, 4  # warps of a decoding CTA, and tiles of each, of one panel
NORM_PIECES = 4  # pieces of 8 numbers that a thread keeps of a row
GRID_TOGETHER = 8  # grid search multipliers that a thread tries at once
PIECE, SELECT_THREADS = 16384, 512  # ids from which a CTA selects candidates
COUNTED, COUNT_THREADS = 4096, 512  # ids that a CTA adjusts, and whose occurrences it counts
STRETCH = 2048  # positions of a history that a CTA searches for repetitions
TEAM = 8  # CTAs for a row of many candidates
EXCHANGE_CTAS = 512  # most of a launch with an exchange between GPUs
SCAN_COLUMNS = 32  # of a state, that a CTA has while it reads a prompt
# bytes of its shared memory: keys of two chunks; state, values, two kinds of δ, decays
SCAN_ROOM = 2 * 2 * CHUNK_TOKENS * 136 + 4 * (
    SCAN_COLUMNS * (130 + 66 + 66 + 72) + 2 * CHUNK_TOKENS
)
# CUDA errors of a launch that cannot run as it is; another one may
REFUSALS = {
    2: "too little memory",
    701: "too few registers or too little shared memory",
    720: "too few free multiprocessors for CTAs that wait for each other",
}

DEFINITIONS = {
    "PANEL_ROWS": PANEL_ROWS,
    "MOST_COLUMNS": MOST_COLUMNS,
    "GRID_TOGETHER": GRID_TOGETHER,
    "GRID_POINTS": torch_ops.GRID_POINTS,
    "SCALE_LEVELS": SCALE_LEVELS,
    "TILE_COLUMNS": TILE,
    "CTA_WARPS": shares.WARPS,
    "STEP": shares.STEP,
    "BLOCK_PANELS": BLOCK_PANELS,
    "MOST_MATRICES": product.MOST_MATRICES,
    "MOST_TOGETHER": batched.MOST_TOGETHER,
    "MOST_CHAINED": product.MOST_CHAINED,
    "MOST_STAGES": product.MOST_STAGES,
    "MOST_TILES": product.MOST_TILES,
    "X_PIECES": product.X_PIECES,
    "LIST_HEADER": batched.LIST_HEADER,
    "ITEM_ROWS": experts.ITEM_ROWS,
    "EXPERT_WARPS": experts.EXPERT_WARPS,
    "MOST_BEGINS": experts.MOST_BEGINS,
    "ROUTE_ROWS": experts.ROUTE_ROWS,
    "MANY_ROWS": experts.MANY_ROWS,
    "MANY_WARPS": experts.MANY_WARPS,
    "MANY_CHUNK": experts.MANY_CHUNK,
    "MANY_SLOTS": experts.MANY_SLOTS,
    "GATHER_THREADS": experts.GATHER_THREADS,
    "SCORES": ",".join(Scores.__members__),
    "ATTENTION_WARPS": ATTENTION_WARPS,
    "ATTENTION_STEP": ATTENTION_STEP,
    "ROW_PAD": ROW_PAD,
    "LONG_ROW_PAD": LONG_ROW_PAD,
    "DECODE_WARPS": DECODE_WARPS,
    "DECODE_TILES": DECODE_TILES,
    "PAGE_TOKENS": PAGE_TOKENS,
    "STEP_TOKENS": STEP_TOKENS,
    "RING": RING,
    "SCAN_COLUMNS": SCAN_COLUMNS,
    "SCAN_ROOM": SCAN_ROOM,
    "TINY": torch_delta.TINY,
    "NORM_PIECES": NORM_PIECES,
    "REFIT_MAXIMA": torch_refit.REFIT_MAXIMA,
    "LEAST_CURVATURE": torch_refit.LEAST_CURVATURE,
    "LEAST_UNIT": torch_refit.LEAST_UNIT,
    "MAXIMA": torch_ops.MAXIMA,
    "WIDEST_COLUMNS": torch_ops.WIDEST_COLUMNS,
    "CODE_REACH": torch_ops.CODE_REACH,
    "EXPECTED_SHARE": torch_ops.EXPECTED_SHARE,
    "EPSILON": torch_ops.EPSILON,
    "CLASSES": torch_descent.CLASSES,
    "START_SWEEPS": torch_descent.START_SWEEPS,
    "RETRIES": torch_descent.RETRIES,
    "PIECE": PIECE,
    "SELECT_THREADS": SELECT_THREADS,
    "COUNTED": COUNTED,
    "COUNT_THREADS": COUNT_THREADS,
    "ELEMENTS": ",".join(Element.__members__),
    "ACTIVATIONS": ",".join(ACTIVATIONS).upper(),
    "SWIGLU_LIMIT": SWIGLU_LIMIT,
    "SWIGLU_SLOPE": SWIGLU_SLOPE,
    "SETTINGS": ",".join(sampling.COLUMNS).upper(),
    "STRETCH": STRETCH,
    "TEAM": TEAM,
    "EXCHANGE_CTAS": EXCHANGE_CTAS,
    "MOST_RANKS": product.MOST_RANKS,
    "MOST_REPEATED": sampling.MOST_REPEATED,
    "STRONGEST": str(sampling.STRONGEST),  # fp64
    "LEAST": str(torch_sampler.LEAST),
    "NEAR": str(torch_sampler.NEAR),
}
GROUPED, GROUPED_CAPABILITY = "batched<64", 90  # what uses `grouped.cuh`, and where it can
_BUILDING: dict[tuple[str, str | None], threading.Lock] = {}  # by source and instance
log = logging.getLogger(__name__)


class LaunchRefused(RuntimeError):
    """The driver refused a launch, of which nothing ran; `reason` is one of `REFUSALS`."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@cache
def options_of(file: str) -> tuple[str, ...]:
    """Return the options to compile a source: the constants that it names, and no others.

    So a source is compiled anew only for a constant of its own.
    """
    code = source(file)
    names = (name for name in DEFINITIONS if re.search(rf"\b{name}\b", code))
    values = ((name, DEFINITIONS[name]) for name in names)
    return "-std=c++17", *(
        f"-D{name}={value}f" if isinstance(value, float) else f"-D{name}={value}"
        for name, value in values
    )


@cache
def module(file: str, instance: str | None = None) -> cupy.RawModule:
    """Return a source as a module; CuPy builds it for each device that uses it.

    Args:
        file: the source.
        instance: of a template, such as `attend<128, HALF, HALF>`; only it is built, because all
            instances of a file take 10 s. None: the functions that are not templates.
    """
    code, options, architecture = source(file), options_of(file), virtual_architecture()
    if architecture is not None:
        return cupy.RawModule(path=ptx_file(code, options, architecture, instance)[0])
    names = None if instance is None else (instance,)
    return cupy.RawModule(code=code, options=options, name_expressions=names)


@cache
def function(file: str, name: str, architecture: str | None = None) -> cupy.RawKernel:
    """Return a function of a source, or an instance of a template, which may be of `GROUPED`."""
    if architecture is not None:
        path, name = cubin_file(source(file), options_of(file), architecture, name)
        return cupy.RawModule(path=path).get_function(name)
    instance, virtual = name if "<" in name else None, virtual_architecture()
    if instance is not None and virtual is not None:
        name = ptx_file(source(file), options_of(file), virtual, instance)[1]
    with _BUILDING.setdefault((file, instance), threading.Lock()):  # `ahead` may be building it
        return module(file, instance).get_function(name)


def build(file: str, name: str, device: int) -> None:
    """Build a function for a device unless that is done; launches then find it."""
    capability(device)
    with cupy.cuda.Device(device):
        _ = function(file, name, _grouped(name, device)).kernel


def launch(
    file: str,
    name: str,
    grid: tuple[int, ...],
    *arguments: torch.Tensor | int | np.generic,
    threads: int = THREADS,
    shared: int = 0,
    device: torch.device | None = None,
    together: bool = False,
) -> None:
    """Launch a function of a source.

    From sm_90 on, one of a source with `early.cuh` may start before the previous launch ends: it
    waits by itself.

    Args:
        file: the source.
        name: the function.
        grid: number of CTAs along each axis.
        arguments: contiguous tensors on one device, and values.
        threads: per CTA.
        shared: bytes of dynamic shared memory per CTA.
        device: where to launch, if no argument is a tensor.
        together: its CTAs wait for each other, so all must be resident at once.

    Raises:
        LaunchRefused: it does not fit on the device as it is now.
    """
    device = device or next(a.device for a in arguments if isinstance(a, torch.Tensor))
    call, words, pointers = _CALL, _CALL.words, _CALL.pointers
    structs: list[np.ndarray] = []
    for place, argument in enumerate(arguments):
        if isinstance(argument, int):
            words[place] = argument
        elif isinstance(argument, torch.Tensor):
            assert argument.is_contiguous(), f"{name} needs contiguous tensors"
            words[place] = argument.data_ptr()
        elif argument.nbytes <= WORD:
            words[place] = int.from_bytes(argument.tobytes(), sys.byteorder)
        else:
            if not structs:  # an interrupted launch must not leave their addresses behind
                pointers = _Pointers.from_buffer_copy(pointers)
            structs.append(np.asarray(argument))
            pointers[place] = structs[-1].ctypes.data
    index, how = device.index, call.how
    how.x, how.y, how.z = (*grid, 1, 1)[:3]
    how.threads, how.shared, how.stream = threads, shared, raw_stream(index)
    how.attributes = _EARLY_AT if not together else _TOGETHER_AT
    how.count = together + _is_early(file, index)
    with cupy.cuda.Device(index):
        kernel = _kernel(file, name, index, shared)
        status = _driver().cuLaunchKernelEx(call.at, kernel, pointers, None)
    if status:
        message = f"{name} of {file} could not be launched: CUDA error {status}"
        if status in REFUSALS:
            raise LaunchRefused(message, reason=REFUSALS[status])
        raise RuntimeError(message)


@cache  # so each of them is told once per process
def tell_refusal(file: str, reason: str, instead: str) -> None:
    """Log that launches of a source are refused, and what runs instead."""
    log.warning("launch=%s refused=%s instead=%s", file, reason, instead)


def whole_warps(threads: int) -> int:
    """Round a number of threads up to whole warps."""
    return -(-threads // 32) * 32


@cache
def _kernel(file: str, name: str, device: int, shared: int) -> ctypes.c_void_p:
    """Return the handle of a function on the current device, which may use so much memory."""
    kernel = function(file, name, _grouped(name, device))
    if shared and shared > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared
    return ctypes.c_void_p(kernel.kernel.ptr)


def _grouped(name: str, device: int) -> str | None:
    """Return the architecture to compile a function for, if it has instructions of its own."""
    if not name.startswith(GROUPED) or virtual_architecture() is not None:
        return None
    return f"{GROUPED_CAPABILITY}a" if capability(device) == GROUPED_CAPABILITY else None


def raw_stream(device: int) -> int:
    """Return the handle of torch's current stream; that of a `torch.cuda.Stream` takes 2 us."""
    return int(torch._C._cuda_getCurrentRawStream(device))


@cache
def limits(device: int) -> tuple[int, int]:
    """Return the multiprocessor count of a device, and the most shared memory of a CTA in bytes."""
    attributes = cupy.cuda.Device(device).attributes
    return attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"]


@cache
def capability(device: int) -> int:
    """Return the compute capability, such as 90, of the kernels that a device runs.

    Raises:
        ConfigError: a virtual architecture is set that is newer than the device.
    """
    own, wanted = int(cupy.cuda.Device(device).compute_capability), virtual_architecture()
    if wanted is not None and wanted > own:
        raise ConfigError(
            f"`EXL2FLOW_VIRTUAL_ARCH` is `{wanted}`, but GPU {device} is an sm_{own} and runs "
            f"no newer kernels; set {own} or less, or unset it"
        )
    return own if wanted is None else wanted


@cache
def _is_early(file: str, device: int) -> bool:
    return capability(device) >= 90 and "void wait_for_input" in source(file)


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`."""

    _fields_ = [("kind", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    """`CUlaunchConfig`; blocks are one-dimensional."""

    _fields_ = [
        *((axis, ctypes.c_uint) for axis in ("x", "y", "z", "threads", "block_y", "block_z")),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


# CU_LAUNCH_ATTRIBUTE_COOPERATIVE and _PROGRAMMATIC_STREAM_SERIALIZATION
_ATTRIBUTES = (_Attribute * 2)(*(_Attribute(kind=kind, value=(1,)) for kind in (2, 6)))
_TOGETHER_AT = ctypes.addressof(_ATTRIBUTES)
_EARLY_AT = _TOGETHER_AT + ctypes.sizeof(_Attribute)


_Pointers = ctypes.c_void_p * MOST_ARGUMENTS


class _LaunchCall(threading.local):
    """The launch configuration and argument buffers of a thread, which all its launches reuse."""

    def __init__(self) -> None:
        self.words = (ctypes.c_longlong * MOST_ARGUMENTS)()  # tensors and numbers
        first = ctypes.addressof(self.words)
        self.pointers = _Pointers(*range(first, first + WORD * MOST_ARGUMENTS, WORD))
        self.how = _Launch(block_y=1, block_z=1)
        self.at = ctypes.byref(self.how)


_CALL = _LaunchCall()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
