"""Sets of token ids as bit masks: bit i of word w stands for id 32 w + i."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from exl2flow.core.options.sampling import SamplingSettings
from exl2flow.model import Tokenizer

WORD = 32
BREAKING = frozenset('.,!?<>[](){}"\n\t')  # what ends a repetition for DRY


def words_of(ids: Iterable[int], width: int) -> torch.Tensor:
    """Return the mask int32 (ceil(width / 32),) of the ids below `width`."""
    chosen = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, np.int64)
    flags = np.zeros(-(-width // WORD) * WORD, np.uint8)
    flags[chosen[(chosen >= 0) & (chosen < width)]] = 1
    return torch.from_numpy(np.packbits(flags, bitorder="little").view("<i4"))


@lru_cache(16)
def all_but(ids: frozenset[int], width: int) -> torch.Tensor:
    """Return the mask of all other ids, which is shared: do not write to it."""
    return ~words_of(ids, width)


def ids_of(words: torch.Tensor) -> list[int]:
    """Return the ids of a mask, ascending."""
    flags = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
    ids: list[int] = flags.nonzero()[0].tolist()
    return ids


@lru_cache(8)
def breakers(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that no repetition contains by default.

    These are special tokens and pieces with punctuation, brackets, quotes, a line end or a tab.
    """
    return _with_any(BREAKING, tokenizer)


@lru_cache(8)
def newline_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that XTC ignores by default: special tokens and pieces with a line end."""
    return _with_any(frozenset("\n"), tokenizer)


def completed(settings: SamplingSettings, tokenizer: Tokenizer) -> SamplingSettings:
    """Fill in the ids that DRY and XTC leave alone by default."""
    if settings.dry_multiplier and settings.dry_breakers is None:
        settings = replace(settings, dry_breakers=breakers(tokenizer))
    if settings.xtc_probability and settings.xtc_ignored is None:
        settings = replace(settings, xtc_ignored=newline_ids(tokenizer))
    return settings


def _with_any(characters: frozenset[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    specials = set(tokenizer.special_ids)
    return tuple(
        token
        for token, piece in enumerate(tokenizer.pieces)
        if token in specials or not characters.isdisjoint(piece)
    )
