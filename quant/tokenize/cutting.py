"""Cut calibration rows from a stream of tokens.

Rows follow one another as long as the text lasts; rows of articles each begin with a new one. If
the text is too short, rows begin at evenly spaced offsets and overlap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

PIECE_TOKENS = 128  # tokens per piece of a shuffled row


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens of one kind of text; rows may begin at `starts`: after the BOS of each article, or at
    each dialogue."""

    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)


def row_offsets(stream: Stream, count: int, length: int) -> list[int]:
    """Return ascending offsets of `count` rows; they repeat only if the stream is too short."""
    last = len(stream.ids) - length
    fresh = _whole_articles(stream.starts, last, length) or range(0, last + 1, length)
    if len(fresh) >= count:
        return list(fresh[:count])
    spread = [last * index // max(count - 1, 1) for index in range(count)]
    step = last // max(count - 1, 1)
    reach = (step - length if step > length else step) // 2  # keeps rows apart, or at least unequal
    return [_nearest(stream.starts, offset, last, reach) for offset in spread]


def overlaps(offsets: Sequence[int], length: int) -> bool:
    """Tell whether any two rows share tokens."""
    return any(after - before < length for before, after in pairwise(offsets))


def cut(stream: Stream, offsets: Sequence[int], length: int, *, bos: int | None) -> torch.Tensor:
    """Return rows int64 (count, length); for articles, the second half begins with `bos`."""
    rows = []
    for index, offset in enumerate(offsets):
        second_half = index >= len(offsets) // 2
        lead = [bos] if stream.starts and second_half and bos is not None else []
        rows.append((lead + stream.ids[offset : offset + length])[:length])
    return torch.tensor(rows)


def shuffled(
    ids: Sequence[int], count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return int64 (count, length) rows of random pieces of `ids`."""
    piece = min(PIECE_TOKENS, length)
    pieces = math.ceil(length / piece)
    begins = torch.randint(len(ids) - piece + 1, (count, pieces, 1), generator=generator)
    picked = torch.tensor(ids)[begins + torch.arange(piece)]  # (count, pieces, piece)
    return picked.reshape(count, -1)[:, :length]


def _whole_articles(starts: Sequence[int], last: int, length: int) -> list[int]:
    """Return offsets of rows that each begin with an article no earlier row has reached."""
    offsets: list[int] = []
    for start in starts:
        if start <= last and (not offsets or start >= offsets[-1] + length):
            offsets.append(start)
    return offsets


def _nearest(starts: Sequence[int], offset: int, last: int, reach: int) -> int:
    """Return the article start closest to `offset` if it is nearer than `reach`, else `offset`."""
    near = [start for start in starts if abs(start - offset) < reach and start <= last]
    return min(near, key=lambda start: abs(start - offset), default=offset)
