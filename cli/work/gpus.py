"""What `exl2flow doctor` finds out about GPUs: the driver, torch, CuPy and each card.

torch and the kernels are imported by the probes, because finding out whether that works is their
task.
"""

import ctypes
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from exl2flow.cli.work.machine import in_words, tried, version_of

WSL_PROGRAMS = "/usr/lib/wsl/lib"  # not on every PATH
FIELDS = ("name", "driver_version", "memory.total", "memory.free", "compute_cap")
SMI_SECONDS = 20.0  # a driver that hangs
NO_DEVICES = "No devices were found"
CUDA_LIBRARY = "libcuda.so.1"  # a part of the driver
CUPY_PACKAGES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
WITHOUT_GPU = "80"  # architecture that is compiled for where there is no GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """NVIDIA's driver, and the newest CUDA that it supports; without a version there is none."""

    version: str | None = None
    cuda: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch; works: it can be imported, cuda: what it is built for, gpus: it sees."""

    version: str | None = None
    works: bool = False
    cuda: str | None = None
    gpus: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CupyBuild:
    """The installed CuPy; runs: whether a kernel ran on every GPU, None: there is none."""

    packages: tuple[str, ...] = ()
    nvrtc: str | None = None
    runs: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU; total, free: bytes, copy_rate: GB/s at which a copy reads and writes its memory."""

    name: str = ""
    total: int | None = None
    free: int | None = None
    capability: str | None = None
    copy_rate: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Everything about GPUs; hidden_by: value of CUDA_VISIBLE_DEVICES, None: not set."""

    driver: Driver
    torch: TorchBuild
    cupy: CupyBuild
    cards: tuple[Gpu, ...]
    hidden_by: str | None = None

    @property
    def is_hidden(self) -> bool:
        """Whether the variable lets programs see no GPU at all."""
        return self.hidden_by is not None and self.hidden_by.strip() in ("", "-1")


def probe_gpus() -> Gpus:
    """Probe the driver, the libraries, and the GPUs that torch sees, or else the driver lists."""
    driver, listed = probe_driver()
    build = tried(probe_torch, lambda why: TorchBuild(version=version_of("torch"), problem=why))
    seen = tuple(_card(index) for index in range(build.gpus))
    return Gpus(
        driver=driver,
        torch=build,
        cupy=probe_cupy(build.gpus),
        cards=seen or listed,
        hidden_by=os.environ.get(VISIBLE),
    )


def probe_driver() -> tuple[Driver, tuple[Gpu, ...]]:
    """Return the driver, and the GPUs that `nvidia-smi` lists."""
    cuda = tried(supported_cuda, lambda why: None)
    program = shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{WSL_PROGRAMS}")
    if program is None:
        return Driver(
            version=tried(_loaded_driver, lambda why: None) if cuda else None, cuda=cuda
        ), ()
    try:
        rows = listed_by(program)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        told = f"`nvidia-smi` fails: {in_words(error)}"
        return Driver(version=tried(_loaded_driver, lambda why: None), cuda=cuda, problem=told), ()
    return Driver(version=rows[0][1] if rows else None, cuda=cuda), tuple(map(_listed, rows))


def supported_cuda() -> str:
    """Return the newest CUDA that the driver supports, as `13.0`; raises `OSError` without one."""
    found = ctypes.c_int()
    status = ctypes.CDLL(CUDA_LIBRARY).cuDriverGetVersion(ctypes.byref(found))
    if status or not found.value:
        raise OSError(f"cuDriverGetVersion returns {status}")
    return f"{found.value // 1000}.{found.value % 1000 // 10}"


def listed_by(program: str) -> list[list[str]]:
    """Return `FIELDS` of every GPU; raises `RuntimeError` with what `nvidia-smi` says."""
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    told = done.stdout.strip() or done.stderr.strip()
    if NO_DEVICES in told:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]
    if done.returncode or any(len(row) != len(FIELDS) for row in rows):
        raise RuntimeError(told or f"exit code {done.returncode}")
    return rows


def _loaded_driver() -> str | None:
    """Return the version of the driver's module in the kernel, None if none is loaded."""
    from exl2flow.inference.bench.speed import DRIVER, driver_version

    return driver_version(DRIVER.read_text()) if DRIVER.exists() else None


def _listed(row: list[str]) -> Gpu:
    """Return a GPU from its line; what a card does not tell is `[N/A]`."""
    name, _, *sizes, capability = row
    total, free = (int(cell) * MIB if cell.isdecimal() else None for cell in sizes)
    known = capability if capability.replace(".", "").isdecimal() else None
    return Gpu(name=name, total=total, free=free, capability=known)


def probe_torch() -> TorchBuild:
    """Return the build of torch, and why it sees no GPU if it says so."""
    import torch

    with _warnings() as told:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem = None if count or not told else told[0]
    return TorchBuild(
        version=torch.__version__, works=True, cuda=torch.version.cuda, gpus=count, problem=problem
    )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield a list that has the first lines of the warnings of the block when it ends."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield told
    told += [str(each.message).partition("\n")[0] for each in found]


def probe_cupy(gpus: int) -> CupyBuild:
    """Return the installed CuPy, and whether a kernel compiles and runs on each of the GPUs."""
    pairs = ((name, version_of(name)) for name in CUPY_PACKAGES)
    found = CupyBuild(packages=tuple(f"{name} {known}" for name, known in pairs if known))
    if not found.packages:
        return found
    try:
        with _warnings():
            from exl2flow.kernels.backend import LEAST_NVRTC
            from exl2flow.kernels.cuda.ptx import nvrtc_version
            from exl2flow.kernels.cuda.trial import compile_trial, run_trial

            compiler = nvrtc_version()
            found = replace(found, nvrtc=_dotted(compiler))
            if compiler < LEAST_NVRTC:  # it may end the process
                told = f"the kernels need NVRTC {_dotted(LEAST_NVRTC)} or later"
                return replace(found, problem=told)
            if not gpus:
                compile_trial(WITHOUT_GPU)
                return found
            right = all(run_trial(index) for index in range(gpus))
    except Exception as error:  # of a package that is damaged, or does not fit the driver
        return replace(found, runs=False if gpus else None, problem=in_words(error))
    return replace(found, runs=right, problem=None if right else "a kernel gives wrong results")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _card(index: int) -> Gpu:
    found = tried(lambda: probe_card(index), lambda why: Gpu(name=f"GPU {index}", problem=why))
    return found if found.problem else timed(found, index)


def probe_card(index: int) -> Gpu:
    """Return a GPU as torch sees it."""
    import torch

    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(name=about.name, total=total, free=free, capability=f"{about.major}.{about.minor}")


def timed(card: Gpu, index: int) -> Gpu:
    """Return a GPU with the rate at which it copies, which torch's own kernels measure."""
    try:
        import torch

        from exl2flow.inference.bench import copy_rate

        with torch.cuda.device(index):
            return replace(card, copy_rate=copy_rate())
    except Exception as error:  # torch has no kernels for it, or another program has its memory
        return replace(card, problem=in_words(error))
