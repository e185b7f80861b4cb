"""Few combinations of many values: enough that any two values meet."""

from collections.abc import Sequence
from itertools import combinations, product


def pairs_of(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """Return combinations, one value of each axis, in which every two values of two axes occur.

    Greedy: each combination is the first with the most pairs that none before it has. For 7, 9 and
    5 values these are 63 in place of 315.
    """
    spaces = list(combinations(range(len(axes)), 2))

    def met(chosen: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, b, chosen[a], chosen[b]) for a, b in spaces}

    left = {chosen: met(chosen) for chosen in product(*map(range, map(len, axes)))}
    found = []
    while new := left[best := max(left, key=lambda chosen: len(left[chosen]))].copy():
        for pairs in left.values():
            pairs -= new
        found.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return found
