"""Sizes of a model and of a GPU, from which stages forecast memory and disk.

Each stage's module has a function that forecasts its `Need`. Constants count what exists at the
worst moment of the code beside them. The sums were compared with the peaks of models that are
mostly hidden states, mostly wide matrices or mostly head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from exl2flow.core.runtime.memory import free_memory, limit_memory
from exl2flow.model import ModelSpec, ProjectionSpec
from exl2flow.model.files.exl2 import padded_columns
from exl2flow.model.layers.stream import CALIBRATION_ROWS, EXPERT_ROWS
from exl2flow.quant.walk.divergence import logit_bytes
from exl2flow.quant.walk.working_memory import together_bytes, working_bytes

HALF, FLOAT, TOKEN = 2, 4, 8  # bytes of fp16, of fp32, of a token's id
SUBLAYER_WEIGHT = 34  # bytes per weight: read, padded, rounded, refined, decoded, packed
EXPERT_WEIGHT = 16  # the same of experts that wait while another one is rounded
EXPERT_HESSIANS = 4  # matrices (k, k) of each expert: Hessian, cross products, Fisher factors
HESSIANS = 10  # matrices (k, k) from a Hessian to its factor
PASSING = 8  # copies of the activations of rows that pass together, in the widest sublayer
LIBRARIES = 1 << 28  # workspaces of a GPU's libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU; memory: bytes available to tensors."""

    name: str
    memory: int

    @classmethod
    def of(cls, device: torch.device, limit: int | None) -> Self:
        """Describe a device, limited to `limit` bytes."""
        limit_memory(device, limit)
        return cls(name=torch.cuda.get_device_name(device), memory=free_memory(device))


class ModelSizes:
    """Sizes of a model's parts, and the memory that stages need for them on a machine.

    Main memory is forecast as if there were no GPU, except for stages that hold the whole model
    where they compute; for the others see `quant/forecast/main_memory.py`.

    packed: bytes of all quantized matrices; factors: of the largest Fisher factors on disk, 0
    without them.
    """

    def __init__(self, spec: ModelSpec, card: Card | None, *, packed: int, factors: int) -> None:
        self.spec, self.card, self.packed, self.factors = spec, card, packed, factors
        # bytes of its state, or of a pair of states
        pairs = any(sublayer.is_paired for sublayer in spec.sublayers)
        self.token = FLOAT * spec.hidden_size * (2 if pairs else 1)
        parts = [
            [(p.in_features, padded_columns(p.out_features)) for p in projections]
            for projections in (*(s.projections for s in spec.sublayers), (spec.head,))
        ]
        *sublayers, self.head = (sum(k * n for k, n in part) for part in parts)
        self.sublayer = max(sublayers)
        groups = [s for s in spec.sublayers if s.group is not None]
        self.group = max((sum(p.numel for p in s.projections) for s in groups), default=0)
        self.dense = max(
            (size for size, s in zip(sublayers, spec.sublayers, strict=True) if s.group is None),
            default=0,
        )
        widths = [max(p.in_features, p.out_features) for s in groups for p in s.projections]
        self.passing = EXPERT_ROWS * max(widths, default=0)  # of rows that pass experts together
        experts = [p.numel for s in groups for p in s.projections]
        self.expert = 3 * max(experts, default=0)  # its three matrices
        self.squares = max((hessian_elements(s.projections) for s in groups), default=0)
        self.largest = max(k * n for part in parts for k, n in part)
        place = max(range(len(parts)), key=lambda i: sum(k * (k + n) for k, n in parts[i]))
        self.greatest = parts[place]
        readers = [*(s.projections for s in spec.sublayers), (spec.head,)][place]
        self.read_squares = hessian_elements(readers)  # of the activations of the greatest part

    def worked_on(self, weight: int) -> int:
        """Return the bytes for the matrices of a sublayer, given those per weight.

        Of experts, one at a time is worked on.
        """
        return max(weight * self.dense, EXPERT_WEIGHT * self.group + weight * self.expert)

    def walk_memory(self, weights: int, tokens: int) -> int:
        """Return the bytes of a walk beside states: a sublayer or the head, and what both share.

        Shared are the activations of a row, Hessians and Fisher factors (half of each is on disk).

        Args:
            weights: bytes for the matrices of a sublayer.
            tokens: tokens per row.
        """
        widest = max(p.in_features for p in self.spec.projections)
        squares = max(HESSIANS * widest**2, EXPERT_HESSIANS * self.squares)
        shared = FLOAT * (8 * tokens * widest + squares) + 2 * self.factors
        head = SUBLAYER_WEIGHT * self.head + logit_bytes(tokens, self.spec.vocab_size)
        return shared + max(weights, head)

    def gpu_work(self, tokens: int, *, weight: int, square: int, is_shared: bool = False) -> int:
        """Return a GPU's work on the greatest part in bytes, activations of the rows included.

        Args:
            tokens: tokens per row.
            weight: bytes per weight.
            square: bytes per element of a Hessian.
            is_shared: matrices that read the same activation share a Hessian, else each has one,
                in its own order of rows.
        """
        widest = max(max(size) for size in self.greatest)
        passing = PASSING * FLOAT * tokens * max(CALIBRATION_ROWS * widest, self.passing)
        squares = self.read_squares if is_shared else sum(k * k for k, _ in self.greatest)
        return passing + weight * sum(k * n for k, n in self.greatest) + square * squares

    def together(self, copies: int, runs: int = 1) -> int:
        """Return a GPU's bytes for experts side by side; see `together_bytes`."""
        parts = (s.projections for s in self.spec.sublayers)
        return max(together_bytes(projections, copies=copies, runs=runs) for projections in parts)

    def group_work(self, tokens: int, *, weight: int, square: int, beside: int) -> int:
        """Return a GPU's work on a group of experts in bytes; 0 without experts.

        Args:
            tokens: tokens per row.
            weight: bytes per weight of the group.
            square: bytes per element of a Hessian.
            beside: what rounding takes, after rows have passed.
        """
        if not self.group:
            return 0
        passing = PASSING * FLOAT * tokens * self.passing
        return weight * self.group + square * self.squares + max(passing, beside)

    def on_gpu(self, work: int, states: int = 0) -> dict[str, int]:
        """Return a GPU's entries of a `Need`: libraries, work, and the states if they fit."""
        if self.card is None:
            return {}
        limit = self.card.memory
        pinned = states if states + working_bytes(self.spec, limit) > limit else 0
        memory = min(LIBRARIES + work + states - pinned, limit)
        return {"gpu_memory_bytes": memory, "pinned_bytes": pinned}


def hessian_elements(projections: Sequence[ProjectionSpec]) -> int:
    """Return the elements of the Hessians of all activations that projections read."""
    widths = {p.capture: p.in_features for p in projections}
    return sum(k * k for k in widths.values())
