"""Sublayers that follow each other on one device."""

from collections.abc import Sequence

import torch

from exl2flow.kernels import FusedLinear
from exl2flow.model.config.spec import ModelSpec
from exl2flow.model.layers.attention import AttentionSublayer
from exl2flow.model.layers.cache import KvCache
from exl2flow.model.layers.delta import DeltaSublayer
from exl2flow.model.layers.experts import entering
from exl2flow.model.layers.fused_chain import Chains
from exl2flow.model.layers.parallel import ParallelSublayer
from exl2flow.model.layers.rope import RopeTables, at_layer
from exl2flow.model.layers.sublayer import Sublayer


class Span:
    """The sublayers of some layers; a pass takes them in order, one at a time.

    device: where they are, and where hidden states enter; layers: perhaps none.
    """

    def __init__(
        self, spec: ModelSpec, sublayers: Sequence[Sublayer], *, device: torch.device, layers: range
    ) -> None:
        """Take those of all sublayers that belong to the layers."""
        self.device, self.layers = device, layers
        self._spec, self._sublayers = spec, sublayers
        self._places = [i for i, s in enumerate(spec.sublayers) if s.layer_index in layers]
        self._chains: Chains | None = None
        if isinstance(sublayers, list):
            self._chains = Chains.of([sublayers[place] for place in self._places])

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTables = 0, cache: KvCache | None = None
    ) -> torch.Tensor:
        """Map hidden states (b, t, hidden); `start` and `cache` are those of all layers."""
        if self._chains and hidden.dtype == torch.float16:
            return self._chains(hidden, start=start, cache=cache)
        return self._through(self._places, hidden, start, cache)

    def fill(self, hidden: torch.Tensor, *, start: int | RopeTables, cache: KvCache) -> None:
        """Add the keys and values of hidden states to a cache; see `Decoder.fill`."""
        if self._chains and hidden.dtype == torch.float16:
            self._chains.fill(hidden, start=start, cache=cache)
            return
        last = max(i for i in self._places if self._spec.sublayers[i].has_cache)
        before, index = [i for i in self._places if i < last], self.layers[-1]
        hidden = self._through(before, hidden, start, cache)
        sublayer = self._sublayers[last]
        assert isinstance(sublayer, AttentionSublayer | DeltaSublayer | ParallelSublayer)
        sublayer.fill(hidden, start=at_layer(start, index), cache=cache.layer(index))

    def calls(self, rows: int) -> list[list[Sequence[FusedLinear]]]:
        """Return a step's products between attentions, for each pair, by call of `multiply`.

        None unless all linears are packed.
        """
        chains = self._chains.of_step(rows) if self._chains else None
        return [link.calls for link in chains.links[1:]] if chains else []

    def _through(
        self,
        places: Sequence[int],
        hidden: torch.Tensor,
        start: int | RopeTables,
        cache: KvCache | None,
    ) -> torch.Tensor:
        """Return the output of these sublayers."""
        for place in places:
            sublayer = self._sublayers[place]
            index = sublayer.spec.layer_index
            layer = None if cache is None else cache.layer(index)
            hidden = entering(hidden, sublayer.spec, self._spec.hidden_size)
            hidden = sublayer(hidden, start=at_layer(start, index), cache=layer)
        return hidden[..., : self._spec.hidden_size]
