"""Sublayer: the unit that is run, measured and quantized, in two phases.

`reads` computes what projections read, `output` applies the last ones and adds the residual. A
caller may run both separately and replace any linear between them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import reduce
from typing import Self

import torch

from exl2flow.kernels import FusedLinear
from exl2flow.model.config.sublayer_spec import NormRole, Role, SublayerSpec
from exl2flow.model.layers.cache import LayerCache
from exl2flow.model.layers.fuse import Products, product_of
from exl2flow.model.layers.linear import Linear
from exl2flow.model.layers.norms import Norm
from exl2flow.model.layers.rope import RopeTable

FusedProjections = Mapping[str, Callable[[torch.Tensor], list[torch.Tensor]]]  # by capture


class Sublayer(ABC):
    """Base of attention and MLP: norms, projections, residual add.

    norms: by role. linears: by name of the projection, whose `capture` names what it reads. Of
    both, one may be replaced at any time.
    multiplier: of the output before it is added to the hidden state.
    """

    def __init__(
        self,
        spec: SublayerSpec,
        *,
        norms: dict[str, Norm],
        linears: dict[str, Linear],
        multiplier: float,
    ) -> None:
        self.spec = spec
        self.norms = norms
        self.linears = linears
        self.multiplier = multiplier
        self.together: FusedProjections = {}
        captures = dict.fromkeys(p.capture for p in spec.projections)
        self._readers = {c: [p.name for p in spec.reading(c)] for c in captures}
        self._last = [p.capture for p in spec.projections if p.is_last]

    def replaced(self, together: FusedProjections) -> Self:
        """Return a sublayer that shares norms and linears, but calls functions in their place.

        Args:
            together: capture → function from what is read to the outputs of all its projections.
        """
        sublayer = copy(self)
        sublayer.together = together
        return sublayer

    def normed(self, role: NormRole, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm of a role, if there is one."""
        norm = self.norms.get(role)
        return x if norm is None else norm(x)

    def apply_linears(self, capture: str, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of the projections that read an activation, in their order."""
        together = self.together.get(capture)
        if together is not None:
            return together(x)
        return [self.linears[name](x) for name in self._readers[capture]]

    def with_roles(self, *roles: Role) -> list[Linear]:
        """Return the linears with these roles, in order, skipping missing ones."""
        names = {p.role: p.name for p in self.spec.projections}
        return [self.linears[names[role]] for role in roles if role in names]

    def residual_product(self, role: Role) -> FusedLinear | None:
        """Return the product that a part of the sublayer adds to hidden states, if packed."""
        if self.together:
            return None
        return product_of(
            self.with_roles(role),
            after=self.norms.get("after"),
            multiplier=self.multiplier,
            adds=True,
        )

    @abstractmethod
    def reads(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> dict[str, torch.Tensor]:
        """Return by capture what the projections read, (b, t, k) each, in order.

        Args:
            hidden: (b, t, hidden).
            start: position of the first token, or the rotation of all tokens.
            cache: receives this call's keys and values and returns all of them.
        """

    def reads_like(
        self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Return what the projections read of other states of the same tokens as `reads`."""
        return self.reads(hidden)

    def of_rows(
        self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor], places: Sequence[int]
    ) -> Mapping[str, torch.Tensor]:
        """Return what the projections read of some rows of hidden states (b, t, hidden).

        Args:
            hidden: of all rows.
            reads: of all rows.
            places: of the rows. Unlike an index, they are not sent to the device.
        """
        if len(places) == 1:  # a view
            return {capture: x[places[0]][None] for capture, x in reads.items()}
        return {
            capture: torch.stack([x[place] for place in places]) for capture, x in reads.items()
        }

    def contributions(
        self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of parts that are corrected separately, by `SublayerSpec.unit`."""
        return {"": self.output(hidden, reads)}

    @abstractmethod
    def products(self) -> Products:
        """Return the products of each part: before and after attention, or what down reads.

        Of a parallel block: what both parts read, with the attention's beside the MLP's, and what
        adds the MLP, both before attention; and what adds attention. None where linears are not all
        packed.
        """

    def output(self, hidden: torch.Tensor, reads: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the next hidden state, (b, t, hidden), of a hidden state and its `reads`."""
        outputs = (self.apply_linears(capture, reads[capture])[0] for capture in self._last)
        update = self.normed("after", reduce(torch.add, outputs))
        return hidden + (update if self.multiplier == 1.0 else update * self.multiplier)

    def settled(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states; of pairs, as if the layer's experts ended with this sublayer."""
        return states

    def __call__(
        self, hidden: torch.Tensor, *, start: int | RopeTable = 0, cache: LayerCache | None = None
    ) -> torch.Tensor:
        """Map hidden states to the next hidden states, (b, t, hidden)."""
        return self.output(hidden, self.reads(hidden, start=start, cache=cache))
