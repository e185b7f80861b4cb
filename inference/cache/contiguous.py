"""Keys and values in one tensor per layer, allocated in full when the cache is created."""

import torch

from exl2flow.inference.cache.layered import CountedLayer, LayeredCache
from exl2flow.model import ModelSpec, RopeTable, attend


class ContiguousLayer(CountedLayer):
    """Keys and values of one layer, (b, kv_heads, max_tokens, head_dim) each."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__(k.shape[-2])
        self._k = k
        self._v = v

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: RopeTable,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        q, k = table.rotate(q), table.rotate(k)
        end = self.length + k.shape[-2]
        self._k[..., self.length : end, :] = k
        self._v[..., self.length : end, :] = v
        held = (x[..., :end, :].to(q.dtype) for x in (self._k, self._v))
        return attend(q, *held, scale=scale, window=window)


class ContiguousCache(LayeredCache[ContiguousLayer]):
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
        layers = (
            ContiguousLayer(
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in range(spec.num_layers)
        )
        super().__init__(layers, max_tokens=max_tokens)
