"""Kernels of another architecture than the GPU's plain one, as files: CuPy makes only that one's.

PTX of an older one, which the driver compiles for the GPU: with `EXL2FLOW_VIRTUAL_ARCH=80` any GPU
runs what an A100 or a 3090 runs. `__CUDA_ARCH__` is 800, so there are no bulk copies, no launches
that overlap and no `stmatrix`. Or machine code of one with more instructions, such as sm_90a.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache

from cupy.cuda import nvrtc

from exl2flow.core.errors import KernelError

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")  # CuPy adds them to ours


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the compiler that CuPy uses, as of the CUDA toolkit."""
    major, minor = nvrtc.getVersion()
    return major, minor


@cache
def ptx_file(
    code: str, options: tuple[str, ...], architecture: int, instance: str | None
) -> tuple[str, str]:
    """Compile a source; return a file with its PTX, kept until the process ends.

    Returns:
        The file, and the name in it of the instance; empty if none is asked for.
    """
    ptx, name = ptx_of(code, options, architecture, instance)
    return _written(ptx, ".ptx"), name


@cache
def cubin_file(
    code: str, options: tuple[str, ...], architecture: str, instance: str
) -> tuple[str, str]:
    """Compile an instance to machine code; return a file with it, and the name in it.

    Raises:
        KernelError: it does not compile, or NVRTC does not know the architecture.
    """
    cubin, name = _compiled(code, options, f"sm_{architecture}", instance)
    return _written(cubin, ".cubin"), name


def _written(content: bytes, suffix: str) -> str:
    descriptor, path = tempfile.mkstemp(suffix, dir=_folder())
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    return path


def ptx_of(
    code: str, options: tuple[str, ...], architecture: int, instance: str | None
) -> tuple[bytes, str]:
    """Compile a source; return its PTX, and the name in it of the instance, if one is asked for.

    Raises:
        KernelError: it does not compile, or NVRTC does not know the architecture.
    """
    return _compiled(code, options, f"compute_{architecture}", instance)


def _compiled(
    code: str, options: tuple[str, ...], target: str, instance: str | None
) -> tuple[bytes, str]:
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    try:
        if instance is not None:
            nvrtc.addNameExpression(program, instance)
        nvrtc.compileProgram(program, (*options, *CUPY_OPTIONS, f"-arch={target}"))
        name = "" if instance is None else nvrtc.getLoweredName(program, instance)
        is_virtual = target.startswith("compute")
        return (nvrtc.getPTX if is_virtual else nvrtc.getCUBIN)(program), name
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip("\0\n") or error
        raise KernelError(f"no code of {target}: {log}") from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="exl2flow-ptx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
