"""Keys and values in one tensor per layer, reserved in full when the cache is made."""

import torch

from exl2flow.core.errors import ContextOverflow
from exl2flow.model import ModelSpec, attend


class ContiguousLayer:
    """Keys and values of one layer, (b, kv_heads, max_tokens, head_dim) each."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._k = k
        self._v = v
        self.length = 0

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """See `LayerCache`.

        Raises:
            ContextOverflow: there is no room for so many more.
        """
        end = self.length + k.shape[-2]
        check_room(end, self._k.shape[-2])
        self._k[..., self.length : end, :] = k
        self._v[..., self.length : end, :] = v
        self.length = end
        held = (x[..., :end, :].to(q.dtype) for x in (self._k, self._v))
        return attend(q, *held, scale=scale, window=window)


class ContiguousCache:
    """A cache for `batch` sequences of equal length."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        batch: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        attention = spec.attention
        shape = (batch, attention.num_kv_heads, max_tokens, attention.head_dim)
        self.max_tokens = max_tokens
        self.layers = tuple(
            ContiguousLayer(
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(spec.num_layers)
        )

    @property
    def length(self) -> int:
        """Tokens that all layers hold."""
        return min(layer.length for layer in self.layers)

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
