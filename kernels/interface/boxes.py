"""Memory through which ranks exchange rows, each of which runs on a GPU of one host."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch


class Boxes(Protocol):
    """Words that the ranks of a host have sent to this one, in the memory of its GPU.

    handle: by which other processes open it; peers: what a kernel is told of it, once all are open;
    patience: seconds for which a kernel waits for another rank.
    """

    rank: int
    count: int
    device: torch.device
    handle: bytes
    peers: np.void
    patience: float

    def open(self, handles: Sequence[bytes], *, patience: float) -> bool:
        """Open the boxes of all ranks, by their handles; False if one is out of reach."""
        ...

    def wait_for(self, patience: float) -> None:
        """Set the seconds that later launches wait."""
        ...

    @property
    def room(self) -> int:
        """Words of 4 bytes that a rank sends at most."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether a kernel has waited in vain: its results, and all later ones, have no meaning."""
        ...

    def added(
        self, x: torch.Tensor, hidden: torch.Tensor | None, multiplier: float
    ) -> torch.Tensor:
        """Return hidden + multiplier · Σ x over all ranks, fp16 in the shape of x.

        Args:
            x: this rank's part, fp32, of at most `room` elements.
            hidden: fp16 in its shape; or None.
            multiplier: of the sum.
        """
        ...

    def gathered(
        self, x: torch.Tensor, widths: Sequence[int], to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the columns of all ranks, (rows, Σ widths), in the dtype of x.

        Args:
            x: this rank's own, (rows, width), fp16 of even width or fp32; no rank has more than
                `room` words.
            widths: of all ranks, the same on all.
            to: where each column goes, int32 (Σ widths,), if x is fp16; None: in order.
        """
        ...

    def abort(self) -> None:
        """Let kernels that wait end, now and later; any thread may call this."""
        ...

    def close(self) -> None:
        """Close the memory of the others, when nothing uses it any more."""
        ...
