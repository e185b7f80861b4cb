"""Peers: ranks whose GPUs write into each other's memory, which is faster than NCCL for a step."""

import logging
import socket
from collections.abc import Callable, Sequence
from hashlib import sha256
from statistics import median
from typing import Self

import torch

from exl2flow.core.errors import InferenceError
from exl2flow.kernels import Boxes, elapsed, get_ops

PATIENCE = 60.0  # seconds for which a kernel waits for another rank: it may be compiling
TRIAL_PATIENCE = 5.0
TRIAL_WORDS, TRIALS = 8192, 20
HANDLE_BYTES = 64
Gather = Callable[[torch.Tensor], list[torch.Tensor]]  # a tensor of each rank, of one shape

log = logging.getLogger(__name__)


class PeerExchange:
    """Exchanges of few rows between the GPUs of one host; all ranks make the same ones.

    They may be part of a CUDA graph. Nothing tells the host when another rank does not come: the
    kernel ends after `PATIENCE`, and `check` raises. boxes: for exchanges within other kernels.
    """

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    @classmethod
    def meet(cls, rank: int, count: int, device: torch.device, gather: Gather) -> Self | None:
        """Return the exchange of all ranks; None unless it works and is faster than `gather`."""
        peers = cls.open(rank, count, device, gather, patience=TRIAL_PATIENCE)
        if peers is None:
            return None
        with torch.cuda.device(device):
            is_right, ours, theirs = peers._try(gather)
        votes = gather(torch.tensor([is_right, ours < theirs], device=device))
        is_taken = all(bool(vote[0]) for vote in votes) and bool(votes[0][1])
        log.info("exchange=%s peers_us=%.1f nccl_us=%.1f", is_taken, 1e3 * ours, 1e3 * theirs)
        if not is_taken:
            peers.close()
            return None
        peers.boxes.wait_for(PATIENCE)
        return peers

    @classmethod
    def open(
        cls, rank: int, count: int, device: torch.device, gather: Gather, *, patience: float
    ) -> Self | None:
        """Return the exchange of all ranks; None if one of them cannot reach another's memory.

        Args:
            rank: of this process.
            count: of all.
            device: the GPU of this process.
            gather: returns a tensor of each rank, of one shape.
            patience: seconds for which a kernel waits for another rank.
        """
        boxes = _opened(rank, count, device, gather, patience)
        return None if boxes is None else cls(boxes)

    def takes(self, words: int) -> bool:
        """Return whether a rank can send a number of words, of 4 bytes, at once."""
        return 0 < words <= self.boxes.room

    def added(
        self, x: torch.Tensor, hidden: torch.Tensor | None = None, multiplier: float = 1.0
    ) -> torch.Tensor:
        """Return hidden + multiplier · Σ x of all ranks in their order; see `Ranks.added`."""
        return self.boxes.added(x, hidden, multiplier)

    def gather(
        self, x: torch.Tensor, widths: Sequence[int], to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the columns of all ranks, (rows, Σ widths); see `Ranks.gather`, and `check`."""
        self.check()
        return self.boxes.gathered(x, widths, to)

    def check(self) -> None:
        """Raise `InferenceError` if a kernel has waited for another rank in vain; costs 1 µs."""
        if self.boxes.has_failed:
            boxes = self.boxes
            raise InferenceError(
                f"rank {boxes.rank} waited {boxes.patience:g} s for another one of {boxes.count}; "
                "start all again"
            )

    def close(self) -> None:
        """Leave the others' memory."""
        self.boxes.close()

    def _try(self, gather: Gather) -> tuple[bool, float, float]:
        """Return whether a sum is right, and the milliseconds of one, ours and by `gather`."""
        boxes = self.boxes
        x = torch.arange(TRIAL_WORDS, device=boxes.device).float() + boxes.rank
        wanted = sum(range(boxes.count)) + boxes.count * torch.arange(TRIAL_WORDS).float()
        times = [_median(lambda: self.added(x)), _median(lambda: gather(x))]
        found = self.added(x).cpu()
        return torch.equal(found, wanted.half()) and not boxes.has_failed, times[0], times[1]


def _opened(
    rank: int, count: int, device: torch.device, gather: Gather, patience: float
) -> Boxes | None:
    """Return boxes that all ranks have opened; None if one of them cannot."""
    boxes = get_ops(device).new_boxes(rank, count, device)
    told = bytes(HANDLE_BYTES) if boxes is None else boxes.handle
    told += sha256(socket.gethostname().encode()).digest()
    sent = torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device)
    all_told = [bytes(part.tolist()) for part in gather(sent)]
    handles = [part[:HANDLE_BYTES] for part in all_told]
    can_open = all(map(any, handles)) and len({part[HANDLE_BYTES:] for part in all_told}) == 1
    is_open = can_open and boxes is not None and boxes.open(handles, patience=patience)
    if all(map(bool, gather(torch.tensor([is_open], device=device)))):
        return boxes
    if boxes is not None:
        boxes.close()
    return None


def _median(work: Callable[[], object]) -> float:
    """Return the milliseconds of a piece of work on the device."""
    return median(elapsed(work) for _ in range(TRIALS))
