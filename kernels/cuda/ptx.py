"""Kernels of an older architecture than the GPU's: PTX, which the driver compiles for the GPU.

With `EXL2FLOW_VIRTUAL_ARCH=80` any GPU runs what an A100 or a 3090 runs: `__CUDA_ARCH__` is 800, so
there are no bulk copies, no overlapping launches and no `stmatrix`. CuPy makes machine code only.
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
    descriptor, path = tempfile.mkstemp(".ptx", dir=_folder())
    with os.fdopen(descriptor, "wb") as file:
        file.write(ptx)
    return path, name


def ptx_of(
    code: str, options: tuple[str, ...], architecture: int, instance: str | None
) -> tuple[bytes, str]:
    """Compile a source; return its PTX, and the name in it of the instance, if one is asked for.

    Raises:
        KernelError: it does not compile, or NVRTC does not know the architecture.
    """
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    try:
        if instance is not None:
            nvrtc.addNameExpression(program, instance)
        nvrtc.compileProgram(program, (*options, *CUPY_OPTIONS, f"-arch=compute_{architecture}"))
        name = "" if instance is None else nvrtc.getLoweredName(program, instance)
        return nvrtc.getPTX(program), name
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip("\0\n") or error
        raise KernelError(f"no PTX of compute_{architecture}: {log}") from error
    finally:
        nvrtc.destroyProgram(program)


@cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="exl2flow-ptx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
