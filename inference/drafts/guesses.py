"""What proposes tokens, and what it sees of the slots whose texts it continues."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from exl2flow.core.errors import ConfigError
from exl2flow.inference.cache.paged import PagedCache
from exl2flow.inference.cache.views import Segment
from exl2flow.inference.loading.load import LoadedModel
from exl2flow.kernels import STEP_TOKENS
from exl2flow.kernels.cuda.graphs import Recordings
from exl2flow.model import Decoder

MOST_DRAFTED = STEP_TOKENS - 1  # tokens of one text that a pass verifies


class Slots(NamedTuple):
    """What a model that guesses shares with the slots of a generator; see `Steps`."""

    cache: PagedCache
    tables: torch.Tensor
    lengths: torch.Tensor
    recordings: Recordings


class Wanted(NamedTuple):
    """A text by its ids, which may take `most` more tokens from a draft; `owner` keeps them."""

    owner: object
    ids: Sequence[int]
    most: int


class Guesses(Protocol):
    """What guesses for the slots of one generator."""

    @property
    def decoder(self) -> Decoder | None:
        """The model that it runs, if any."""

    def read(self, tokens: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Follow a pass over prompts, int64 (1, t)."""

    def copy(self, pages: torch.Tensor) -> None:
        """Follow the copy of pages, int64 (2, n): sources and targets."""

    def guess(self, wanted: Mapping[int, Wanted]) -> Mapping[int, Sequence[int]]:
        """Return what may follow the texts, by slot."""


class Drafter(Protocol):
    """What a caller gives a generator; `tokens`: at most so many are guessed for a text at once."""

    @property
    def tokens(self) -> int: ...
    def start(self, model: LoadedModel, slots: Slots) -> Guesses: ...


def check(name: str, value: float, least: float, most: float) -> None:
    """Raise `ConfigError` for a field of a draft that is out of range."""
    if not least <= value <= most:
        raise ConfigError(f"`{name}` of a draft is {value}; it must be from {least} to {most}")
