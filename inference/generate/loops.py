"""When a text repeats itself without end.

It does if its tokens end in at least `COPIES` copies of one passage, of up to
`LONGEST_TEXT // COPIES` tokens, that span at least `SHORTEST_LOOP` tokens: a ruled line or a short
table is no loop. Only every `INTERVAL`-th token is looked at, for the search costs about 0.3 ms.
"""

from collections.abc import Sequence

COPIES = 4
SHORTEST_LOOP = 128  # tokens
LONGEST_TEXT = 1024  # tokens looked at
INTERVAL = 32


def is_loop(ids: Sequence[int]) -> bool:
    """Return whether generated ids end in a loop; false between intervals."""
    if len(ids) < SHORTEST_LOOP or len(ids) % INTERVAL:
        return False
    last = ids[-LONGEST_TEXT:][::-1]
    borders = [0] * len(last)  # by end: length of the longest proper prefix that is also a suffix
    length = 0
    for end in range(1, len(last)):
        while length and last[end] != last[length]:
            length = borders[length - 1]
        length += last[end] == last[length]
        borders[end] = length
        period = end + 1 - length
        if end + 1 >= max(SHORTEST_LOOP, COPIES * period):
            return True
    return False
