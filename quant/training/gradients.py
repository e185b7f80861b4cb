"""Gradients of a step, of rows in pieces: their sum is the same whatever the number of ranks."""

from collections.abc import Sequence

import torch

from exl2flow.core.runtime.ranks import WorkRanks


class Gradients:
    """Takes the gradients of this rank's pieces, in order, and puts the sums of all there.

    values: the trained tensors, the same at all ranks; ranks: that share the rows.
    """

    def __init__(self, values: Sequence[torch.Tensor], ranks: WorkRanks) -> None:
        self.values, self.ranks = values, ranks
        self._parts: list[list[torch.Tensor | None]] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add those of a loss to the piece that is not taken yet: a backward pass."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types

    def take(self) -> None:
        """Take those of a piece whose backward passes are done."""
        found = [value.grad for value in self.values]
        for value in self.values:
            value.grad = None
        if not self._parts or self.ranks.rank:
            self._parts.append(found)
            return
        (whole,) = self._parts  # the pieces of rank 0 are the first
        self._parts = [[_sum(x, y) for x, y in zip(whole, found, strict=True)]]

    def share(self, counts: Sequence[int]) -> None:
        """Give all values the sums over all pieces; one that no piece has a gradient for has none.

        Args:
            counts: how many pieces with rows each rank has.
        """
        parts, self._parts = self._parts, []
        if not self.ranks.are_many:
            (grads,) = parts
            for value, grad in zip(self.values, grads, strict=True):
                value.grad = grad
            return
        own = [any(part[i] is not None for part in parts) for i in range(len(self.values))]
        have = [any(found) for found in zip(*self.ranks.told_by_all(own), strict=True)]
        for i, value in enumerate(self.values):
            if not have[i]:
                continue
            own_parts = [torch.zeros_like(value) if (x := part[i]) is None else x for part in parts]
            for part in parts:
                part[i] = None  # free each as soon as it is there
            value.grad = self.ranks.everywhere(
                own_parts, [min(counts[0], 1), *counts[1:]], value.detach()
            )


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    return x.add_(y)
