"""A kernel of one line: whether CuPy, NVRTC and the driver of a GPU fit together.

It is compiled in every process; CuPy's cache on disk would hide a compiler that is missing.
"""

import cupy

from exl2flow.kernels.cuda.ptx import cubin_file

CODE = "__global__ void add_one(int* numbers) { numbers[threadIdx.x] += 1; }"
NAME = "add_one"
THREADS = 32


def compile_trial(architecture: str) -> tuple[str, str]:
    """Compile the kernel for an architecture such as `90`; return its file, and its name in there.

    Raises:
        KernelError: it does not compile, or NVRTC does not know the architecture.
    """
    return cubin_file(CODE, (), architecture, NAME)


def run_trial(device: int) -> bool:
    """Compile the kernel for a GPU and run it; return whether its results are right."""
    with cupy.cuda.Device(device) as gpu:
        path, name = compile_trial(gpu.compute_capability)
        numbers = cupy.zeros(THREADS, dtype=cupy.int32)
        cupy.RawModule(path=path).get_function(name)((1,), (THREADS,), (numbers,))
        return bool((numbers.get() == 1).all())
