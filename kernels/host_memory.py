"""Host memory that a GPU reads in place."""

import weakref
from contextlib import suppress

import torch

from exl2flow.core.errors import BackendUnavailable
from exl2flow.core.words import size

PORTABLE_MAPPED = 1 | 2  # `cudaHostRegisterPortable`, `cudaHostRegisterMapped`


class _Registered:
    """An array of a GPU (`__cuda_array_interface__`) in host memory, which it keeps alive."""

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        api = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
        self.host = host
        with torch.cuda.device(device):  # whose array torch then sees
            status = api.cudaHostRegister(host.data_ptr(), host.nbytes, PORTABLE_MAPPED)
            if int(status):
                with suppress(RuntimeError):
                    torch.arange(1, device=device)  # the next launch reports the error again
                raise BackendUnavailable(
                    f"{size(host.nbytes)} of host memory cannot be pinned for {device} "
                    f"(CUDA error {int(status)}); free memory, or raise the limit of your "
                    "container or of WSL"
                )
        weakref.finalize(self, api.cudaHostUnregister, host.data_ptr()).atexit = False
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False),
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def read_in_place(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of a GPU that is in host memory: the GPU reads what it needs when it does.

    It can be recorded, and any operation can use it, at the rate of the bus. The tensor's memory
    is pinned and kept until nothing uses it.

    Raises:
        BackendUnavailable: the memory cannot be pinned.
    """
    rows = torch.as_tensor(_Registered(host.contiguous(), torch.device(device)), device=device)
    return rows.view(host.dtype).view(host.shape)
