"""The experts of a layer, whose matrices stay packed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from exl2flow.kernels.interface.activations import ACTIVATIONS, GATED_ACTIVATIONS
from exl2flow.kernels.interface.norm import NormArgs
from exl2flow.kernels.interface.packed import PackedMatrix
from exl2flow.kernels.interface.router import RouterArgs

FEW_EXPERT_ROWS = 32  # most rows for which a layer of experts is one launch
MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 1024, 31, 32  # that a warp chooses among, and of these


class ExpertMatrices(NamedTuple):
    """The matrices of an expert, down(activation(gate(x)) · up(x))."""

    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class ExpertBank:
    """The experts of a layer, all or some, and what chooses among all.

    norm: of what enters; or None. experts: by id, as far as they are here; places: of each id, its
    index in them, or -1, int64 (ids,); or None: all are here. shared: the one that reads all
    tokens, or a part of it; or None; shared_gate: fp32 (1, hidden), whose sigmoid weighs it; or
    None: it counts as it is.
    activation: of `ACTIVATIONS` or `GATED_ACTIVATIONS`. multiplier: of their sum, before it is
    added to the hidden state.
    """

    norm: NormArgs | None
    router: RouterArgs
    experts: tuple[ExpertMatrices, ...]
    places: torch.Tensor | None = None
    shared: ExpertMatrices | None = None
    shared_gate: torch.Tensor | None = None
    activation: str
    multiplier: float = 1.0

    @property
    def all(self) -> tuple[ExpertMatrices, ...]:
        """The experts, the shared one last."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    @property
    def is_known(self) -> bool:
        """Whether the kernels know all that is asked for."""
        rule = self.router.rule
        is_small = (
            rule.experts <= MOST_EXPERTS and rule.top <= MOST_CHOSEN and rule.groups <= MOST_GROUPS
        )
        is_activated = self.activation in {*ACTIVATIONS, *GATED_ACTIVATIONS}
        return is_small and is_activated and all(map(_is_known, self.all))


def _is_known(expert: ExpertMatrices) -> bool:
    gate, up, _ = expert
    return gate.order is up.order and not any(matrix.has_zeros for matrix in expert)
