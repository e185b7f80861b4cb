"""Rows dealt to ranks: which are here, and sums over all of them.

A sum is that of `pieces` of the rows, each summed apart, added in order: it is the same whatever
the number of ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import torch

from exl2flow.core.runtime.ranks import ALONE, WorkRanks


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
        found = self.of_rank(self.ranks.rank)
        return range(found[0].start, found[-1].stop) if found else range(0)

    @property
    def pieces(self) -> list[slice]:
        """The pieces of the rows of this rank, counted from its first one."""
        found = self.of_rank(self.ranks.rank)
        return [slice(p.start - found[0].start, p.stop - found[0].start) for p in found]

    def of_rank(self, rank: int) -> list[range]:
        """Return the pieces of a rank, in order."""
        return [range(self.rows)] if self.is_whole else self.ranks.own(self.rows, rank)

    def total(self, parts: list[torch.Tensor], like: torch.Tensor, to: int) -> torch.Tensor | None:
        """Return at one rank the sum over all rows; others receive None.

        Args:
            parts: of this rank's pieces; rank 0 gives their sum alone.
            like: of their shape, dtype and device.
            to: the rank.
        """
        counts = [len(self.of_rank(rank)) for rank in range(self.ranks.count)]
        counts[0] = min(counts[0], 1)
        return self.ranks.total(parts, counts, like, to)


class Accumulated:
    """Tensors that are summed over rows.

    summed: names of the attributes that hold them; count: of what was added.
    """

    summed: ClassVar[tuple[str, ...]]
    count: torch.Tensor | float = 0

    def tensors(self) -> list[torch.Tensor]:
        """Return the sums."""
        return [getattr(self, name) for name in self.summed]

    def replaced(self, tensors: Iterable[torch.Tensor], count: float = 0) -> Self:
        """Return other sums of these shapes."""
        other = copy(self)
        for name, x in zip(self.summed, tensors, strict=True):
            setattr(other, name, x)
        other.count = count
        return other

    def empty(self) -> Self:
        """Return sums of these shapes over nothing."""
        return self.replaced(map(torch.zeros_like, self.tensors()))

    def add_sum(self, other: Self) -> None:
        """Add what was added to other sums."""
        for x, y in zip(self.tensors(), other.tensors(), strict=True):
            x.add_(y)
        self.count = self.count + other.count


class MatrixSum(Accumulated):
    """A sum of products of activations: `matrix` fp32 (k, k)."""

    summed = ("matrix",)

    def __init__(self, k: int, *, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(k, k, dtype=torch.float32, device=device)


Sum = TypeVar("Sum", bound=Accumulated)


class NamedSums(dict[str, Sum]):
    """Sums by name, such as that of an activation or a projection."""

    def empty(self) -> Self:
        """Return the same sums over nothing."""
        return type(self)({name: total.empty() for name, total in self.items()})

    def add_sum(self, other: Self) -> None:
        """Add what was added to other sums."""
        for name, total in self.items():
            total.add_sum(other[name])

    def total(self, deal: Deal, parts: Sequence[Self], to: Callable[[str], int]) -> Self:
        """Return the sums over all rows that this rank gets; these are of their shapes.

        Args:
            deal: of the rows.
            parts: see `Deal.total`.
            to: name → the rank that gets the sum.
        """
        if not deal.ranks.are_many:
            (whole,) = parts
            return whole
        own = [{name: _number(total.count) for name, total in part.items()} for part in parts]
        counts = [part for of_rank in deal.ranks.told_by_all(own) for part in of_rank]
        found = dict[str, Sum]()
        for name, like in self.items():
            own_tensors = [part[name].tensors() for part in parts]
            sums = [
                deal.total([of_part[place] for of_part in own_tensors], x, to(name))
                for place, x in enumerate(like.tensors())
            ]
            whole_sums = [x for x in sums if x is not None]
            if whole_sums:
                found[name] = like.replaced(whole_sums, sum(part[name] for part in counts))
        return type(self)(found)


def _number(count: torch.Tensor | float) -> float:
    return float(count) if isinstance(count, torch.Tensor) else count


class PieceSums(Generic[Sum]):
    """Sums over the pieces of this rank, which come in order."""

    def __init__(self, deal: Deal, empty: NamedSums[Sum]) -> None:
        """Begin with the sums of no rows."""
        self.deal, self._empty = deal, empty
        self._parts: list[NamedSums[Sum]] = []  # rank 0, whose are the first, adds them at once
        self._open, self._number = empty, -1

    def at(self, number: int) -> NamedSums[Sum]:
        """Return the sums of a piece, to be added to; it ends those before."""
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

    def total(self, to: Callable[[str], int] = lambda name: 0) -> NamedSums[Sum]:
        """Return what this rank gets of the sums over all rows; it ends the sums.

        Args:
            to: name → the rank that gets the sum.
        """
        self.at(len(self.deal.pieces) - 1)
        self._close()
        parts, self._parts = self._parts, []
        return self._empty.total(self.deal, parts, to)


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
