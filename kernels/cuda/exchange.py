"""Exchanges between GPUs of one host: kernels that write into memory which processes share."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import cupy
import numpy as np
import torch
from cupy.cuda import runtime

from exl2flow.kernels.cuda.compiler import EXCHANGE_CTAS, build, launch, limits
from exl2flow.kernels.interface.boxes import Boxes
from exl2flow.kernels.plans.product import MOST_RANKS
from exl2flow.kernels.plans.sources import fill, filled, struct

ROOM = 1 << 23  # words of 4 bytes that all ranks together send at most: 128 MiB of boxes
THREADS = 128  # of a CTA: many scatter faster, few let the next launch begin beside them
EACH, OF_WARP, CTAS_EACH = 4, 128, 4  # words of a thread and a warp; most CTAs of a multiprocessor
KERNELS = SUMS, COLUMNS = "exchange_sums", "exchange_columns"
LAZY_PEER_ACCESS = 1  # a flag of cudaIpcOpenMemHandle
Unreachable = runtime.CUDARuntimeError  # memory that cannot be shared
PEERS = struct("peers.cuh", "Peers", MOST_RANKS=MOST_RANKS)
ALONE = np.zeros(1, PEERS)[0]  # no ranks


class PeerBoxes:
    """See `Boxes`. The memory stays until the process ends, because others may have it open."""

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        """Reserve the memory.

        Raises:
            Unreachable: there is too little, or it cannot be shared.
        """
        self.rank, self.count, self.device = rank, count, device
        size = 2 * count * self.room * np.dtype(np.uint64).itemsize
        with cupy.cuda.Device(device.index):
            self._own = runtime.malloc(size)
            runtime.memset(self._own, 0, size)
            runtime.deviceSynchronize()
            self.handle = bytes(runtime.ipcGetMemHandle(self._own))
        self._opened = list[int]()

    def open(self, handles: Sequence[bytes], *, patience: float) -> bool:
        """See `Boxes.open`; builds the kernels, too."""
        try:
            addresses = self._addresses(handles)
        except Unreachable:
            return False
        self._failed = torch.zeros(1, dtype=torch.int32).pin_memory()  # kernels write to it
        self.peers = np.zeros(1, PEERS)[0]
        self.peers["boxes"][: self.count] = addresses
        self._used = fill(
            self.peers,
            counters=torch.zeros(EXCHANGE_CTAS + 1, dtype=torch.int32, device=self.device),
            failed=self._failed,
        )
        filled(self.peers, rank=self.rank, count=self.count, room=self.room)
        self.wait_for(patience)
        for name in KERNELS:
            build("exchange.cu", name, self.device.index)
        return True

    def _addresses(self, handles: Sequence[bytes]) -> list[int]:
        addresses = list[int]()
        with cupy.cuda.Device(self.device.index):
            for rank, handle in enumerate(handles):
                if rank == self.rank:
                    addresses.append(self._own)
                    continue
                self._opened.append(runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))
                addresses.append(self._opened[-1])
        return addresses

    def wait_for(self, patience: float) -> None:
        """See `Boxes.wait_for`."""
        self.patience = patience
        self.peers["patience"] = round(1e9 * patience)

    @property
    def room(self) -> int:
        """See `Boxes.room`."""
        return ROOM // self.count // OF_WARP * OF_WARP

    @property
    def has_failed(self) -> bool:
        """See `Boxes.has_failed`."""
        return bool(self._failed[0])

    def abort(self) -> None:
        """See `Boxes.abort`."""
        self._failed[0] = 1

    def close(self) -> None:
        """See `Boxes.close`."""
        with cupy.cuda.Device(self.device.index), suppress(Unreachable):
            runtime.deviceSynchronize()
            for address in self._opened:
                runtime.ipcCloseMemHandle(address)
        self._opened.clear()

    def added(
        self, x: torch.Tensor, hidden: torch.Tensor | None, multiplier: float
    ) -> torch.Tensor:
        """See `Boxes.added`."""
        y = torch.empty_like(x, dtype=torch.float16, memory_format=torch.contiguous_format)
        others = 0 if hidden is None else hidden.contiguous()
        self._launch(SUMS, x, others, y, x.numel(), np.float32(multiplier))
        return y

    def gathered(
        self, x: torch.Tensor, widths: Sequence[int], to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Boxes.gathered`."""
        y = x.new_empty(len(x), sum(widths))
        begins = _begins(tuple(width * x.element_size() // 4 for width in widths), x.device)
        self._launch(COLUMNS, x, y, begins, 0 if to is None else to, len(x))
        return y

    def _launch(
        self, name: str, x: torch.Tensor, *arguments: torch.Tensor | int | np.generic
    ) -> None:
        x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        pieces = -(-x.numel() * x.element_size() // (4 * EACH))
        processors, _ = limits(self.device.index)
        ctas = min(EXCHANGE_CTAS, CTAS_EACH * processors, -(-pieces // THREADS))
        launch("exchange.cu", name, (ctas,), self.peers, x, *arguments, threads=THREADS)


def new_boxes(rank: int, count: int, device: torch.device) -> Boxes | None:
    """See `Ops.new_boxes`."""
    with suppress(Unreachable):
        return PeerBoxes(rank, count, device) if count <= MOST_RANKS else None
    return None


@cache
def _begins(words: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where the words of each rank begin in a row, and their end."""
    return torch.tensor([0, *np.cumsum(words).tolist()], dtype=torch.int32, device=device)
