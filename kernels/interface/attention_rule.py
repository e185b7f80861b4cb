"""Attention scores: scale, softcap, mask, sinks and softmax."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Scale, window, chunk, softcap and sinks of a layer's attention.

    scale: multiplies them; window: how many positions, its own included, a query sees (None: all);
    chunk: positions of a stretch of the text within which queries see keys (None: it is not cut);
    softcap: scores s become `softcap · tanh(s / softcap)` (None: unchanged); sinks: fp32 (heads,),
    one more score of each head, of a position without a value (None: none).
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)

    @property
    def is_fused(self) -> bool:
        """Whether torch's attention follows it."""
        return self.softcap is None and self.sinks is None

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which keys each query sees, bool (t, n), of positions (t,) and (n,)."""
        queries, keys = queries[:, None], keys[None]
        seen = keys <= queries
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        return seen if self.chunk is None else seen & (keys >= self.begin(queries))

    def begin(self, positions: torch.Tensor) -> torch.Tensor:
        """Return where the chunks of positions begin."""
        assert self.chunk is not None
        return positions - positions % self.chunk

    def weights(self, products: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """Return the shares of values, from products q · k fp32 (…, heads, t, n)."""
        if self.softcap is None:
            scores = products * self.scale
        else:
            scores = self.softcap * torch.tanh(products * (self.scale / self.softcap))
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
