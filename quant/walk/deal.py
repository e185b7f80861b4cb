"""Rows dealt to ranks: which are here, and sums over all of them.

A sum is that of `pieces` of the rows, each summed apart, added in order: it is the same whatever
the number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch

from exl2flow.core.runtime.ranks import ALONE, WorkRanks


class Addable(Protocol):
    """Tensors that are summed over rows."""

    def empty(self) -> Self:
        """Return sums of the same shapes, over no rows."""

    def add_sum(self, other: Self) -> None:
        """Add those of other rows."""

    def total(self, deal: "Deal", parts: Sequence[Self], to: Callable[[str], int]) -> Self:
        """Return what this rank gets of the total of the parts of all; this is of their shapes.

        Args:
            deal: of the rows.
            parts: of this rank.
            to: name of a part of the sum → the rank that gets it.
        """


Sum = TypeVar("Sum", bound=Addable)


@dataclass(frozen=True, slots=True)
class Deal:
    """Rows of a stage by number, of which this rank has the ones of some pieces.

    rows: how many all ranks have together; is_whole: they are one piece, all of them here.
    """

    rows: int
    ranks: WorkRanks = ALONE
    is_whole: bool = False

    @property
    def own(self) -> range:
        """The rows of this rank."""
        found = self._pieces_of(self.ranks.rank)
        return range(found[0].start, found[-1].stop) if found else range(0)

    @property
    def pieces(self) -> list[slice]:
        """The pieces of the rows of this rank, counted from its first one."""
        found = self._pieces_of(self.ranks.rank)
        return [slice(p.start - found[0].start, p.stop - found[0].start) for p in found]

    def _pieces_of(self, rank: int) -> list[range]:
        return [range(self.rows)] if self.is_whole else self.ranks.own(self.rows, rank)

    def total(self, parts: list[torch.Tensor], like: torch.Tensor, to: int) -> torch.Tensor | None:
        """Return at one rank the sum over all rows; others receive None.

        Args:
            parts: of this rank's pieces; rank 0 gives their sum alone.
            like: of their shape, dtype and device.
            to: the rank.
        """
        counts = [len(self._pieces_of(rank)) for rank in range(self.ranks.count)]
        counts[0] = min(counts[0], 1)
        return self.ranks.total(parts, counts, like, to)


class PieceSums(Generic[Sum]):
    """Sums over the pieces of this rank, which come in order."""

    def __init__(self, deal: Deal, empty: Sum) -> None:
        """Begin with the sum of no rows."""
        self.deal, self._empty = deal, empty
        self._parts: list[Sum] = []  # of pieces; rank 0, whose are the first, adds them at once
        self._open, self._number = empty, -1

    def at(self, number: int) -> Sum:
        """Return the sum of a piece, to be added to; it ends those before."""
        while self._number < number:
            self._close()
            self._open = self._empty.empty() if self._parts else self._empty
            self._number += 1
        return self._open

    def _close(self) -> None:
        if self._number < 0:
            return
        if self._parts and self.deal.ranks.rank == 0:
            self._parts[0].add_sum(self._open)
        else:
            self._parts.append(self._open)

    def total(self, to: Callable[[str], int] = lambda name: 0) -> Sum:
        """Return what this rank gets of the sum over all rows; it ends the sums.

        Args:
            to: name of a part of the sum → the rank that gets it.
        """
        self.at(len(self.deal.pieces) - 1)
        self._close()
        parts, self._parts = self._parts, []
        return self._empty.total(self.deal, parts, to)


class TensorSums(dict[str, torch.Tensor]):
    """Sums that are tensors, by name."""

    @classmethod
    def square(cls, widths: Mapping[str, int], device: torch.device) -> Self:
        """Return zeros fp32 (k, k), given k by name."""
        return cls({name: torch.zeros(k, k, device=device) for name, k in widths.items()})

    def empty(self) -> Self:
        """See `Addable`."""
        return type(self)({name: torch.zeros_like(x) for name, x in self.items()})

    def add_sum(self, other: Self) -> None:
        """See `Addable`."""
        for name, x in self.items():
            x.add_(other[name])

    def total(self, deal: Deal, parts: Sequence[Self], to: Callable[[str], int]) -> Self:
        """See `Addable`."""
        found = type(self)()
        for name, like in self.items():
            whole = deal.total([part[name] for part in parts], like, to(name))
            if whole is not None:
                found[name] = whole
        return found


@dataclass(frozen=True, slots=True)
class Pairs:
    """Some of the rows, by number: those of the source that run beside the quantized model's.

    A pair's place is that of its row among all pairs.
    """

    rows: range
    deal: Deal

    @property
    def own(self) -> list[int]:
        """The numbers of this rank's rows."""
        return [row for row in self.rows if row in self.deal.own]

    @property
    def first(self) -> int:
        """The place of this rank's first one."""
        return sum(row < self.deal.own.start for row in self.rows)

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """Return the pairs' among the states of this rank's rows, (rows, …)."""
        return states[-self.deal.own.start % self.rows.step :: self.rows.step][: len(self.own)]

    def every(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return of this rank's pairs, (pairs, …), those whose place is a multiple of `step`."""
        return x[-self.first % step :: step]
