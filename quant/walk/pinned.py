"""Matrices as large as everything else together: on the device if they fit, else in main memory.

From pinned main memory they move to the GPU and back in windows of rows, so no vocabulary is too
large for a card.
"""

import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch

from exl2flow.core.runtime.memory import limit_of
from exl2flow.kernels import PANEL_ROWS

T = TypeVar("T")
log = logging.getLogger(__name__)
_all_are_tall = ContextVar("all matrices are tall", default=False)

BYTES = 17  # per weight, to round and refine with everything on the device
WINDOW_ROWS = 8 * PANEL_ROWS  # whose changes reach all other rows in one product
TALL_WINDOW_ROWS = 2 * WINDOW_ROWS  # the same for matrices in main memory


def is_tall(elements: int, limit: int) -> bool:
    """Tell whether a matrix belongs in main memory if the GPU may use `limit` bytes.

    Depends on shape and limit only, because it changes the order of sums.
    """
    return BYTES * elements > limit


def made_to_fit(work: Callable[[], T]) -> T:
    """Return the result of `work` on a head; if memory runs out, repeat it with the head tall."""
    try:
        return work()
    except torch.OutOfMemoryError:
        log.warning("remedy=out of memory: the head moves to main memory")
    torch.cuda.empty_cache()  # now that nothing of the work is left
    token = _all_are_tall.set(True)
    try:
        return work()
    finally:
        _all_are_tall.reset(token)


@dataclass(frozen=True, slots=True)
class Tall:
    """values: fp32 (k, m), on the device or, if too large for it, in pinned memory."""

    values: torch.Tensor
    device: torch.device
    is_resident: bool

    @classmethod
    def empty(cls, k: int, m: int, device: torch.device) -> Self:
        """Return a matrix to write into."""
        is_resident = not (_all_are_tall.get() or is_tall(k * m, limit_of(device)))
        where = device if is_resident else None
        pinned = not is_resident and device.type == "cuda"
        values = torch.empty(k, m, device=where, pin_memory=pinned)
        return cls(values, device, is_resident=is_resident)

    @property
    def window(self) -> int:
        """Number of rows that are processed before all others are updated."""
        return WINDOW_ROWS if self.is_resident else TALL_WINDOW_ROWS

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each window and the first row after it."""
        k = len(self.values)
        for top in range(0, k, self.window):
            yield top, min(top + self.window, k)

    def columns(self, columns: slice) -> Self:
        """Return a view of some columns."""
        return replace(self, values=self.values[:, columns])

    def spans(self, begin: int = 0, end: int | None = None) -> Iterator[slice]:
        """Yield the rows that are on the device together: all of them if the matrix is resident."""
        end = len(self.values) if end is None else end
        step = max(1, end - begin) if self.is_resident else self.window
        for start in range(begin, end, step):
            yield slice(start, min(start + step, end))

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return rows on the device; call `write` after changing them."""
        rows = self.values[begin:end]
        return rows if self.is_resident else rows.to(self.device, non_blocking=True, copy=True)

    def write(self, begin: int, rows: torch.Tensor) -> None:
        """Store rows that were read and changed."""
        if not self.is_resident:
            self.values[begin : begin + len(rows)].copy_(rows, non_blocking=True)

    def parts(self, begin: int = 0, end: int | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield `spans` and their rows, which the caller may change."""
        for span in self.spans(begin, end):
            rows = self.read(span.start, span.stop)
            yield span, rows
            self.write(span.start, rows)

    def readings(self) -> Iterator[torch.Tensor]:
        """Yield all rows on the device, span by span, read-only."""
        for span in self.spans():
            yield self.read(span.start, span.stop)
