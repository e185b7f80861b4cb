"""What all caches have in common whose sequences are equally long."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from exl2flow.core.errors import ContextOverflow
from exl2flow.model import LayerCache


class CountedLayer(LayerCache, Protocol):
    """A layer that knows how many tokens it holds, and can be told that it holds fewer."""

    length: int


L = TypeVar("L", bound=CountedLayer)


class LayeredCache(Generic[L]):
    """Layers that have room for `max_tokens` each."""

    def __init__(self, layers: Iterable[L], *, max_tokens: int) -> None:
        self.layers = tuple(layers)
        self.max_tokens = max_tokens

    @property
    def length(self) -> int:
        """Tokens that all layers hold."""
        return min(layer.length for layer in self.layers)

    def lengthen(self, tokens: int) -> None:
        """Count tokens that were written without the layers' knowledge."""
        for layer in self.layers:
            layer.length += tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        for layer in self.layers:
            layer.length = min(layer.length, length)


def check_room(tokens: int, most: int) -> None:
    """Ask that a cache has room.

    Raises:
        ContextOverflow: it has not.
    """
    if tokens > most:
        raise ContextOverflow(
            f"{tokens} tokens do not fit a cache of {most}; make a larger one or shorten the prompt"
        )
