"""Sublayers as data: norms and projections, each with its role."""

from dataclasses import dataclass
from typing import Literal

SublayerKind = Literal["attention", "mlp", "parallel"]
Role = Literal["q", "k", "v", "o", "gate", "up", "down", "head"]
NormRole = Literal["before", "after", "q", "k", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """One norm.

    role: what it normalizes: a sublayer's input or output, queries, keys, the head's input.
    key: its name, without `.weight`.
    shape: of its weight: (d,), or (heads, head_dim) where each head has its own.
    centered: it subtracts the mean (LayerNorm).
    offset: what the stored weight lacks: 1 where it is stored less 1.
    multiplier: of weight + offset, and of the bias, in memory.
    """

    role: NormRole
    key: str
    shape: tuple[int, ...]
    eps: float
    centered: bool = False
    has_bias: bool = False
    offset: float = 0.0
    multiplier: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors."""
        parts = ("weight", "bias") if self.has_bias else ("weight",)
        return tuple(f"{self.key}.{part}" for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """One linear map.

    name: its last name, which differs from those of the sublayer's other projections.
    role: what it computes. capture: the sublayer's name of the activation that it reads.
    """

    name: str
    key: str
    role: Role
    in_features: int
    out_features: int
    has_bias: bool
    capture: str

    @property
    def is_last(self) -> bool:
        """Whether its output is added to the hidden state."""
        return self.role in ("o", "down")

    @property
    def numel(self) -> int:
        """The number of its weights, without padding."""
        return self.in_features * self.out_features

    @property
    def reads(self) -> str:
        """The name of the activation that it reads; the head has one of its own."""
        if self.role == "head":
            return self.key
        return f"{self.key.rpartition('.')[0]}.{self.capture.rpartition('.')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerPart:
    """Projections that are measured together, under the name of their slot."""

    name: str
    projections: tuple[ProjectionSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerSpec:
    """Attention, an MLP, or both; `index` counts sublayers, `layer_index` layers."""

    index: int
    layer_index: int
    name: str
    kind: SublayerKind
    norms: tuple[NormSpec, ...]
    parts: tuple[SublayerPart, ...]

    @property
    def projections(self) -> tuple[ProjectionSpec, ...]:
        """All projections, in order."""
        return tuple(p for part in self.parts for p in part.projections)

    def projection(self, role: Role) -> ProjectionSpec:
        """Return the projection of a role."""
        return next(p for p in self.projections if p.role == role)

    def reading(self, capture: str) -> tuple[ProjectionSpec, ...]:
        """Return the projections that read one activation."""
        return tuple(p for p in self.projections if p.capture == capture)
