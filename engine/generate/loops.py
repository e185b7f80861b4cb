"""Detects a text that repeats itself without end.

A loop is at least `COPIES` copies of one passage at the end of the generated tokens, together at
least `SHORTEST_LOOP` tokens long, so that ruled lines and small tables do not count. A passage has
at most `MOST_CHECKED // COPIES` tokens. A check takes 0.2 ms: there is one per `INTERVAL` tokens.
"""

from collections.abc import Sequence

COPIES = 4
SHORTEST_LOOP = 128  # tokens
MOST_CHECKED = 1024  # tokens
INTERVAL = 32


def is_loop(ids: Sequence[int]) -> bool:
    """Return whether generated ids end in a loop; always false between checks."""
    if len(ids) < SHORTEST_LOOP or len(ids) % INTERVAL:
        return False
    last = ids[-MOST_CHECKED:][::-1]
    borders = [0] * len(last)  # per end: length of the longest proper prefix that is a suffix, too
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
