"""Sets of token ids as bit masks: bit i of word w stands for id 32 w + i."""

from collections.abc import Collection, Iterable, Sequence

import torch

WORD = 32
BREAKING = frozenset('.,!?<>[](){}"\n\t')  # what ends a repetition for DRY


def words_of(ids: Iterable[int], width: int) -> torch.Tensor:
    """Return the mask int32 (ceil(width / 32),) of the ids below `width`."""
    flags = torch.zeros(-(-width // WORD) * WORD, dtype=torch.int64)
    flags[[token for token in ids if 0 <= token < width]] = 1
    return (flags.view(-1, WORD) << torch.arange(WORD)).sum(1).to(torch.int32)


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
