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

    left = {pair: None for chosen in product(*map(range, map(len, axes))) for pair in met(chosen)}
    candidates, found = list(product(*map(range, map(len, axes)))), []
    while left:
        best = max(candidates, key=lambda chosen: len(met(chosen) & left.keys()))
        for pair in met(best):
            left.pop(pair, None)
        found.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    return found
