"""What proposes tokens, and what it sees of the slots whose texts it continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.cache.paged import PagedCache, Segment
from exl2flow.inference.cache.pages import Copy
from exl2flow.inference.load import LoadedModel
from exl2flow.kernels import STEP_TOKENS
from exl2flow.kernels.recording import Recordings

MOST_DRAFTED = STEP_TOKENS - 1  # tokens of one text that a pass verifies


@dataclass(frozen=True, slots=True)
class Slots:
    """What a model that guesses shares with the slots of a generator; see `Steps`."""

    cache: PagedCache
    tables: torch.Tensor
    lengths: torch.Tensor
    recordings: Recordings


@dataclass(frozen=True, slots=True)
class Wanted:
    """A text by its ids, which may take `most` more tokens from a draft; `owner` keeps them."""

    owner: object
    ids: Sequence[int]
    most: int


class Guesses(Protocol):
    """What guesses for the slots of one generator."""

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Follow a pass over prompts, int64 (1, t)."""
        ...

    def copy(self, copy: Copy | None) -> None:
        """Follow the copy of a page."""
        ...

    def guess(self, wanted: Mapping[int, Wanted]) -> Mapping[int, Sequence[int]]:
        """Return what may follow the texts, by slot."""
        ...


class Drafter(Protocol):
    """What a caller gives a generator; `tokens`: at most so many are guessed for a text at once."""

    @property
    def tokens(self) -> int: ...

    def start(self, model: LoadedModel, slots: Slots) -> Guesses:
        """Prepare for a generator of a model."""
        ...


def check_tokens(tokens: int) -> None:
    """Raise `ConfigError` unless a pass can verify so many."""
    if not 1 <= tokens <= MOST_DRAFTED:
        raise ConfigError(f"`tokens` of a draft is {tokens}; it must be 1 to {MOST_DRAFTED}")
