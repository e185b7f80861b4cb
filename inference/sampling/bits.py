"""Sets of token ids as bit masks: bit i of word w stands for id 32 w + i."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch

WORD = 32
BREAKING = frozenset('.,!?<>[](){}"\n\t')  # what ends a repetition for DRY


def words_of(ids: Iterable[int], width: int) -> torch.Tensor:
    """Return the mask int32 (ceil(width / 32),) of the ids below `width`."""
    chosen = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
    flags = np.zeros(-(-width // WORD) * WORD, np.uint8)
    flags[chosen[(chosen >= 0) & (chosen < width)]] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view("<i4"))


def breakers(pieces: Sequence[str], specials: Collection[int]) -> tuple[int, ...]:
    """Return the ids that no repetition contains by default.

    These are special tokens and pieces with punctuation, brackets, quotes, a line end or a tab.
    """
    return _with_any(BREAKING, pieces, specials)


def newline_ids(pieces: Sequence[str], specials: Collection[int]) -> tuple[int, ...]:
    """Return the ids that XTC ignores by default: special tokens and pieces with a line end."""
    return _with_any({"\n"}, pieces, specials)


def _with_any(
    characters: Collection[str], pieces: Sequence[str], specials: Collection[int]
) -> tuple[int, ...]:
    special = set(specials)
    return tuple(
        token
        for token, piece in enumerate(pieces)
        if token in special or any(character in characters for character in piece)
    )
