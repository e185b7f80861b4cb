"""A family row resolved against one `config.json`: everything other code needs to know of a model.

Sublayers state their projections and what each reads, so nothing downstream branches on the kind
of a sublayer or the name of a family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from exl2flow.kernels import AttentionRule, RouterRule
from exl2flow.model.config.family import Experts, Family, HeadNorms
from exl2flow.model.config.rope_spec import RopeSpec
from exl2flow.model.config.sublayer_spec import (
    ExpertGroup,
    NormRole,
    NormSpec,
    ProjectionSpec,
    Role,
    RouterSpec,
    SublayerKind,
    SublayerPart,
    SublayerSpec,
)

GROUP_WEIGHTS = 1 << 27  # as many as the MLP of a 7B has


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer: its heads, what it does with scores, its positions.

    norm_after_rope: queries and keys are normalized after their rotation, not before.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    rope: RopeSpec
    norm_after_rope: bool = False
    qkv_bias: bool
    o_bias: bool
    head_norms: HeadNorms = HeadNorms.NONE

    @property
    def width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, and as many values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Shape of the MLP; if `gated`, its activation is multiplied with a second product.

    activation: one of `kernels.ACTIVATIONS`, or if gated of `GATED_ACTIVATIONS`.
    """

    intermediate_size: int
    activation: str
    has_bias: bool
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Experts of a layer: their router's rule, the shape of each one, and of the shared one."""

    rule: RouterRule
    expert: MlpSpec
    shared: MlpSpec | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as its config describes it.

    attentions, mlps: of each layer; config: the raw `config.json`.
    group_weights: most weights of a group of experts, unless a single one has more; None: a layer's
    experts are one group. No result depends on it but the shape of errors in reports.
    """

    family: Family
    source_dir: Path
    hidden_size: int
    num_layers: int
    vocab_size: int
    norm_eps: float
    tied_head: bool
    attentions: tuple[AttentionSpec, ...]
    mlps: tuple[MlpSpec | ExpertsSpec, ...]
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    has_unit_head: bool = False
    group_weights: int | None = GROUP_WEIGHTS
    config: Mapping[str, object] = field(compare=False, repr=False)

    @cached_property
    def sublayers(self) -> tuple[SublayerSpec, ...]:
        """All sublayers in walk order: attention 0, MLP 0, attention 1, …"""
        rows = [s for layer in range(self.num_layers) for s in _layer(self, layer)]
        return tuple(replace(sublayer, index=index) for index, sublayer in enumerate(rows))

    @property
    def widest_mlp(self) -> int:
        """The features of its widest MLP or expert."""
        widths = [
            part.intermediate_size
            for mlp in self.mlps
            for part in ((mlp,) if isinstance(mlp, MlpSpec) else (mlp.expert, mlp.shared))
            if part is not None
        ]
        return max(widths)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ropes of the layers, in the order of the layers."""
        return tuple(dict.fromkeys(attention.rope for attention in self.attentions))

    @property
    def embedding_key(self) -> str:
        """The embedding's name."""
        return f"{self.family.prefix}embed_tokens"

    @property
    def final_norm(self) -> NormSpec:
        """The norm before the head."""
        return _state_norm(self, "final", f"{self.family.prefix}norm", self.logit_multiplier)

    @property
    def layers_key(self) -> str:
        """The beginning of layers' names, before the index."""
        return f"{self.family.prefix}layers."

    @property
    def head(self) -> ProjectionSpec:
        """The projection to the vocabulary; it reads the final norm's output."""
        return ProjectionSpec(
            name=self.family.head.rpartition(".")[2],
            key=self.family.head,
            role="head",
            in_features=self.hidden_size,
            out_features=self.vocab_size,
            has_bias=False,
            capture="input",
        )

    @cached_property
    def projections(self) -> tuple[ProjectionSpec, ...]:
        """All projections of the decoder, in order; the head is not among them."""
        return tuple(p for sublayer in self.sublayers for p in sublayer.projections)

    @property
    def quant_method(self) -> str | None:
        """The quantization that the config declares; tensor names alone decide how it loads."""
        method = self._quantization.get("quant_method")
        return None if method is None else str(method)

    @property
    def zero_offset(self) -> int:
        """The amount by which stored zeros of GPTQ matrices are too small."""
        return 0 if self._quantization.get("checkpoint_format") == "gptq_v2" else 1

    @property
    def _quantization(self) -> Mapping[str, object]:
        block = self.config.get("quantization_config")
        return block if isinstance(block, Mapping) else {}

    def with_rope(
        self, *, scale: float | None = None, alpha: float | None = None, yarn: float | None = None
    ) -> "ModelSpec":
        """Return this model with positions divided by `scale`, NTK factor `alpha`, YaRN `yarn`.

        YaRN takes the place of the config's own kind, and stretches the original positions. Layers
        without positions stay as they are.
        """
        rotating = [rope for rope in self.ropes if rope.rotary_dim]
        ropes = {rope: rope.scaled(scale=scale, alpha=alpha) for rope in rotating}
        reach = self.max_positions
        if yarn is not None and ropes:
            original = min(reach, *(rope.original_max_positions for rope in ropes))
            ropes = {old: rope.with_yarn(yarn, original) for old, rope in ropes.items()}
            reach = int(original * max(yarn, 1.0))
        layers = (
            replace(layer, rope=ropes.get(layer.rope, layer.rope)) for layer in self.attentions
        )
        return replace(self, attentions=tuple(layers), max_positions=reach)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the dense model's tensors.

    Embedding and head may have more rows in the files. A tied head is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {
        f"{spec.embedding_key}.weight": (spec.vocab_size, spec.hidden_size),
        **dict.fromkeys(spec.final_norm.names, spec.final_norm.shape),
    }
    learned = spec.family.learned_positions
    if learned is not None:
        shapes[f"{learned}.weight"] = (spec.max_positions, spec.hidden_size)
    for sublayer in spec.sublayers:
        for norm in sublayer.norms:
            shapes |= dict.fromkeys(norm.names, norm.shape)
        if sublayer.sinks is not None:
            shapes[sublayer.sinks] = (spec.attentions[sublayer.layer_index].num_heads,)
        if sublayer.group is not None:
            shapes |= router_tensors(spec, sublayer.group)
        for projection in sublayer.projections:
            shapes |= _linear_shapes(projection)
    return shapes if spec.tied_head else shapes | _linear_shapes(spec.head)


def router_tensors(spec: ModelSpec, group: ExpertGroup) -> dict[str, tuple[int, ...]]:
    """Return name → shape of a router's tensors, and of the shared expert's gate."""
    shapes = dict(group.router.tensors(spec.hidden_size))
    if group.shared_gate is not None:
        shapes[f"{group.shared_gate}.weight"] = (1, spec.hidden_size)
    return shapes


def _linear_shapes(projection: ProjectionSpec) -> dict[str, tuple[int, ...]]:
    n, k = projection.out_features, projection.in_features
    shapes: dict[str, tuple[int, ...]] = {f"{projection.key}.weight": (n, k)}
    if projection.has_bias:
        shapes[f"{projection.key}.bias"] = (n,)
    return shapes


LINEARS: dict[str, str] = {  # where a family has no other name
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_Row = tuple[Role, int, int, bool, str]  # role, in- and out-features, bias, capture


def _layer(spec: ModelSpec, layer: int) -> tuple[SublayerSpec, ...]:
    """Return the sublayers of a layer, all of index 0."""
    mlp = spec.mlps[layer]
    if isinstance(mlp, ExpertsSpec):
        attention = _sublayer(spec, layer, "attention", _attention_part(spec, layer))
        return (attention, *_expert_groups(spec, layer, mlp))
    if spec.family.is_parallel:
        parts = (
            _attention_part(spec, layer, inner="self_attn.inner"),
            _mlp_part(spec, layer, mlp, inner="mlp.inner"),
        )
        return (_sublayer(spec, layer, "parallel", *parts, name=f"{spec.layers_key}{layer}"),)
    return (
        _sublayer(spec, layer, "attention", _attention_part(spec, layer)),
        _sublayer(spec, layer, "mlp", _mlp_part(spec, layer, mlp)),
    )


def _sublayer(
    spec: ModelSpec,
    layer: int,
    kind: SublayerKind,
    *parts: SublayerPart,
    name: str = "",
    group: ExpertGroup | None = None,
) -> SublayerSpec:
    place, sinks = 1 if kind in ("mlp", "experts") else 0, spec.family.sinks
    return SublayerSpec(
        index=0,
        layer_index=layer,
        name=name or parts[0].name,
        kind=kind,
        norms=_norms(spec, layer, place),
        parts=parts,
        group=group,
        sinks=f"{spec.layers_key}{layer}.{sinks}" if sinks and not place else None,
    )


def _expert_groups(spec: ModelSpec, layer: int, experts: ExpertsSpec) -> tuple[SublayerSpec, ...]:
    """Divide a layer's experts into groups of about equal size, which only shapes decide."""
    row, rule, start = spec.family.experts, experts.rule, f"{spec.layers_key}{layer}"
    assert row is not None
    router = RouterSpec(
        key=f"{start}.{row.router}",
        rule=rule,
        has_bias=row.router_bias,
        correction=None if row.correction is None else f"{start}.{row.correction}",
        correction_shape=(1, rule.experts) if row.has_wide_correction else (rule.experts,),
    )
    groups = _divided(spec, experts)
    shared = experts.shared if row.shared else None
    sublayers = []
    for place, members in enumerate(groups):
        is_last = place == len(groups) - 1
        parts = []
        if members:
            named = f"{row.experts}.{members[0]}-{members[-1]}"
            rows = [p for e in members for p in _expert(spec, layer, experts.expert, row, e)]
            parts.append(SublayerPart(name=f"{start}.{named}", projections=tuple(rows)))
        if shared is not None and is_last:
            own = _shared_expert(spec, layer, shared, row)
            parts.append(SublayerPart(name=f"{start}.{row.shared}", projections=tuple(own)))
        group = ExpertGroup(
            router=router,
            experts=members,
            has_shared=shared is not None and is_last,
            shared_gate=f"{start}.{row.shared_gate}" if row.shared_gate and shared else None,
            is_first=place == 0,
            is_last=is_last,
        )
        sublayers.append(_sublayer(spec, layer, "experts", *parts, group=group))
    return tuple(sublayers)


def _divided(spec: ModelSpec, experts: ExpertsSpec) -> list[range]:
    """Return the experts of each group; the last group is that of the shared one, too."""
    count, most = experts.rule.experts, spec.group_weights
    if most is None:
        return [range(count)]
    weights = _weights(spec, experts.expert)
    groups = -(-count // max(1, most // weights))
    size = -(-count // groups)
    divided = [range(begin, min(begin + size, count)) for begin in range(0, count, size)]
    shared = 0 if experts.shared is None else _weights(spec, experts.shared)
    if shared and len(divided[-1]) * weights + shared > most:
        divided.append(range(count, count))
    return divided


def _weights(spec: ModelSpec, mlp: MlpSpec) -> int:
    return (3 if mlp.gated else 2) * spec.hidden_size * mlp.intermediate_size


def _expert(
    spec: ModelSpec, layer: int, mlp: MlpSpec, row: Experts, expert: int
) -> Sequence[ProjectionSpec]:
    """Return the projections of an expert."""
    names = {role: f"{expert}.{name}" for role, name in row.linears}
    rows = _mlp_rows(spec, mlp, first=f"{expert}.input", inner=f"{expert}.inner")
    return _projections(f"{spec.layers_key}{layer}.{row.experts}", names, rows, prefix="experts.")


def _shared_expert(
    spec: ModelSpec, layer: int, mlp: MlpSpec, row: Experts
) -> Sequence[ProjectionSpec]:
    rows = _mlp_rows(spec, mlp, first="shared.input", inner="shared.inner")
    names: dict[str, str] = {role: LINEARS[role].rpartition(".")[2] for role, *_ in rows}
    return _projections(f"{spec.layers_key}{layer}.{row.shared}", names, rows, prefix="shared.")


def _attention_part(spec: ModelSpec, layer: int, inner: str = "inner") -> SublayerPart:
    attention, hidden = spec.attentions[layer], spec.hidden_size
    rows: tuple[_Row, ...] = (
        ("q", hidden, attention.width, attention.qkv_bias, "input"),
        ("k", hidden, attention.kv_width, attention.qkv_bias, "input"),
        ("v", hidden, attention.kv_width, attention.qkv_bias, "input"),
        ("o", attention.width, hidden, attention.o_bias, inner),
    )
    return _part(spec, f"{spec.layers_key}{layer}", "self_attn", rows)


def _mlp_part(spec: ModelSpec, layer: int, mlp: MlpSpec, inner: str = "inner") -> SublayerPart:
    rows = _mlp_rows(spec, mlp, first="input", inner=inner)
    return _part(spec, f"{spec.layers_key}{layer}", "mlp", rows)


def _mlp_rows(spec: ModelSpec, mlp: MlpSpec, *, first: str, inner: str) -> tuple[_Row, ...]:
    """Return the projections of an MLP that read activations of these names."""
    hidden, width, bias = spec.hidden_size, mlp.intermediate_size, mlp.has_bias
    rows: tuple[_Row, ...] = (
        ("gate", hidden, width, bias, first),
        ("up", hidden, width, bias, first),
        ("down", width, hidden, bias, inner),
    )
    return rows[not mlp.gated :]


def _part(spec: ModelSpec, layer: str, name: str, rows: tuple[_Row, ...]) -> SublayerPart:
    names = LINEARS | dict(spec.family.linears)
    return SublayerPart(name=f"{layer}.{name}", projections=_projections(layer, names, rows))


def _projections(
    start: str, names: Mapping[str, str], rows: tuple[_Row, ...], prefix: str | None = None
) -> tuple[ProjectionSpec, ...]:
    """Return projections; each has its whole name after `prefix`, or only its last without one."""
    return tuple(
        ProjectionSpec(
            name=names[role].rpartition(".")[2] if prefix is None else prefix + names[role],
            key=f"{start}.{names[role]}",
            role=role,
            in_features=in_features,
            out_features=out_features,
            has_bias=has_bias,
            capture=capture,
        )
        for role, in_features, out_features, has_bias, capture in rows
    )


def _norms(spec: ModelSpec, layer: int, place: int) -> tuple[NormSpec, ...]:
    """Return the norms of a layer's attention (place 0), those of heads included, or MLP (1)."""
    before, after, norms = spec.family.norms, spec.family.post_norms, list[NormSpec]()
    name = f"{spec.layers_key}{layer}"
    if before:
        norms.append(_state_norm(spec, "before", f"{name}.{before[place]}"))
    if after:  # it reads what has no scale yet
        norm = _state_norm(spec, "after", f"{name}.{after[place]}", spec.family.residual_scale)
        norms.append(replace(norm, eps=spec.norm_eps))
    return (*norms, *(_head_norms(spec, layer) if place == 0 else ()))


def _state_norm(spec: ModelSpec, role: NormRole, key: str, multiplier: float = 1.0) -> NormSpec:
    """Describe a norm of hidden states, which are held smaller by the residual scale."""
    family = spec.family
    return NormSpec(
        role=role,
        key=key,
        shape=(spec.hidden_size,),
        eps=spec.norm_eps * family.residual_scale**2,
        centered=family.is_centered,
        has_bias=family.norm_bias,
        offset=family.norm_offset,
        multiplier=multiplier,
    )


def _head_norms(spec: ModelSpec, layer: int) -> tuple[NormSpec, ...]:
    """Return the norms of queries and keys."""
    attention, family = spec.attentions[layer], spec.family
    size = attention.head_dim
    shapes: dict[HeadNorms, tuple[tuple[int, ...], ...]] = {
        HeadNorms.NONE: (),
        HeadNorms.BARE: (),
        HeadNorms.HEAD: ((size,), (size,)),
        HeadNorms.HEADS: ((attention.num_heads, size), (attention.num_kv_heads, size)),
        HeadNorms.WHOLE: ((attention.width,), (attention.kv_width,)),
    }
    roles: tuple[NormRole, NormRole] = ("q", "k")
    return tuple(
        NormSpec(
            role=role,
            key=f"{spec.layers_key}{layer}.self_attn.{name}",
            shape=shape,
            eps=spec.norm_eps,
            centered=family.is_centered,
            offset=family.norm_offset,
        )
        for role, name, shape in zip(
            roles, family.qk_norms, shapes[attention.head_norms], strict=False
        )
    )
