"""The group table of an EXL2 matrix: the bit width and first packed word of every group."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from exl2flow.kernels import Group

BIT_WIDTHS = (8, 6, 5, 4, 3, 2)
ROW_MULTIPLE = 32  # k: packed words and kernels step 32 rows


@lru_cache(maxsize=256)
def groups_of(table: tuple[int, ...], words: int) -> tuple[Group, ...]:
    """Return the groups of a group table; matrices of a model have few different ones."""
    starts = table[1::2]
    groups, row = [], 0
    for bits, start, end in zip(table[::2], starts, (*starts[1:], words), strict=True):
        rows = (end - start) * 32 // bits
        groups.append(Group(bits=bits, start=row, rows=rows))
        row += rows
    return tuple(groups)


def first_words(groups: Sequence[Group]) -> list[int]:
    """Return the first row of each group inside the packed words."""
    sizes = (group.rows * group.bits // 32 for group in groups)
    return list(accumulate(sizes, initial=0))[: len(groups)]


def divides(table: tuple[int, ...], words: int, rows: int) -> bool:
    """Tell whether a group table divides all words and all rows, in order and by whole steps."""
    if not table or table[1] != 0 or not set(table[::2]) <= set(BIT_WIDTHS):
        return False
    counts = [group.rows for group in groups_of(table, words)]
    return all(n > 0 and n % ROW_MULTIPLE == 0 for n in counts) and sum(counts) == rows
