"""Sublayers as data: norms and projections, each with its role."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from exl2flow.kernels import RouterRule
from exl2flow.model.config.delta_spec import PlainTensor

SublayerKind = Literal["attention", "delta", "mlp", "parallel", "experts"]
Role = Literal["q", "k", "v", "o", "qkv", "z", "out", "gate", "up", "down", "head", "joint"]
ROUTED = "experts."  # begins names of projections in a sublayer
NormRole = Literal["before", "after", "q", "k", "final", "embedding", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """One norm.

    role: what it normalizes: a sublayer's input or output, queries, keys, the head's input, what an
        MTP block joins.
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

    name: the end of its name, which differs from those of the sublayer's other projections.
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
        return self.role in ("o", "out", "down")

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to an expert that a router chooses."""
        return self.name.startswith(ROUTED)

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
class RouterSpec:
    """A router, whose tensors are stored as they are.

    key: of its weight; correction: name of the tensor that corrects scores where experts are
    chosen, or None; correction_shape: its shape.
    """

    key: str
    rule: RouterRule
    has_bias: bool = False
    correction: str | None = None
    correction_shape: tuple[int, ...] = ()

    def tensors(self, hidden_size: int) -> Mapping[str, tuple[int, ...]]:
        """Return name → shape of its tensors."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.key}.weight": (self.rule.experts, hidden_size)
        }
        if self.has_bias:
            shapes[f"{self.key}.bias"] = (self.rule.experts,)
        if self.correction is not None:
            shapes[self.correction] = self.correction_shape
        return shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """The experts of a sublayer of kind `experts`, some or all of its layer's.

    experts: ids in order; all of the group's, or those of them that this process has.
    has_shared: whether it has the layer's shared expert, which every token passes; shared_gate:
    key of the map to the logit of that one's weight, or None (its weight is 1).
    is_first, is_last: of the layer's groups.
    """

    router: RouterSpec
    experts: Sequence[int]
    has_shared: bool
    shared_gate: str | None
    is_first: bool
    is_last: bool

    @property
    def is_whole(self) -> bool:
        """Whether it has all experts of its layer, of all processes."""
        return self.is_first and self.is_last


@dataclass(frozen=True, kw_only=True)
class SublayerSpec:
    """Attention, an MLP, both, or experts; `index` counts sublayers, `layer_index` layers.

    group: of kind `experts` only. sinks: name of the sinks of its attention, (heads,), if any.
    plain: by role, other tensors that are stored as they are, of kind `delta` only.
    """

    index: int
    layer_index: int
    name: str
    kind: SublayerKind
    norms: tuple[NormSpec, ...]
    parts: tuple[SublayerPart, ...]
    group: ExpertGroup | None = None
    sinks: str | None = None
    plain: Mapping[str, PlainTensor] = field(default_factory=dict)

    @property
    def has_attention(self) -> bool:
        """Whether it writes keys and values."""
        return self.kind in ("attention", "parallel")

    @property
    def has_cache(self) -> bool:
        """Whether it writes keys and values, or a state."""
        return self.has_attention or self.kind == "delta"

    @property
    def is_paired(self) -> bool:
        """Whether its states are pairs: what entered the layer's experts, and their sum so far."""
        return self.group is not None and not self.group.is_whole

    @cached_property
    def projections(self) -> tuple[ProjectionSpec, ...]:
        """All projections, in order."""
        return tuple(p for part in self.parts for p in part.projections)

    @property
    def block(self) -> str:
        """The name of what is judged as a whole: a sublayer, or all experts of a layer."""
        return self.name if self.group is None else self.name.rpartition(".")[0]

    def unit(self, projection: ProjectionSpec) -> str:
        """Return the name of the part that a projection is corrected with: an expert, or all."""
        return "" if self.group is None else projection.capture.partition(".")[0]

    def projection(self, role: Role) -> ProjectionSpec:
        """Return the projection of a role."""
        return next(p for p in self.projections if p.role == role)

    def reading(self, capture: str) -> tuple[ProjectionSpec, ...]:
        """Return the projections that read one activation."""
        return self._readers.get(capture, ())

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """The in-features of each activation that projections read, by capture."""
        return {capture: readers[0].in_features for capture, readers in self._readers.items()}

    @property
    def widest_first(self) -> list[str]:
        """The captures in the order that needs the least memory if processed one by one."""
        return sorted(self.widths, key=lambda capture: -self.widths[capture])

    @cached_property
    def _readers(self) -> Mapping[str, tuple[ProjectionSpec, ...]]:
        readers: dict[str, tuple[ProjectionSpec, ...]] = {}
        for p in self.projections:
            readers[p.capture] = (*readers.get(p.capture, ()), p)
        return readers
