"""The common part of all caches whose sequences have equal length."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch

from exl2flow.core.errors import ContextOverflow
from exl2flow.model import RopeTable


class CountedLayer(ABC):
    """A `LayerCache` that counts the tokens it holds, and can be truncated."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.length = 0

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """See `LayerCache`.

        Raises:
            ContextOverflow: there is no room for the new tokens.
        """
        end = self.length + k.shape[-2]
        check_room(end, self.max_tokens)
        result = self._attend(q, k, v, table, scale, window)
        self.length = end
        return result

    @abstractmethod
    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store keys and values after the first `length`, and attend."""


L = TypeVar("L", bound=CountedLayer)


class LayeredCache(Generic[L]):
    """Layers with room for `max_tokens` each."""

    def __init__(self, layers: Iterable[L], *, max_tokens: int) -> None:
        self.layers = tuple(layers)
        self.max_tokens = max_tokens

    @property
    def length(self) -> int:
        """Number of tokens that all layers hold."""
        return min(layer.length for layer in self.layers)

    def lengthen(self, tokens: int) -> None:
        """Count tokens that were written past the layers."""
        for layer in self.layers:
            layer.length += tokens

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)


def check_room(tokens: int, most: int) -> None:
    """Check that a cache has room.

    Raises:
        ContextOverflow: it has no room.
    """
    if tokens > most:
        raise ContextOverflow(
            f"{tokens} tokens do not fit a cache of {most}; enlarge it or shorten the prompt"
        )
