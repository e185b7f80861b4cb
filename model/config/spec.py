"""A family row resolved against one `config.json`: everything other code needs to know of a model.

Sublayers state their projections and what each reads, so nothing downstream branches on the kind
of a sublayer or the name of a family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.base import MOST_STRETCH
from exl2flow.kernels import AttentionRule
from exl2flow.model.config.delta_spec import DeltaSpec, plain_tensors
from exl2flow.model.config.experts_spec import (
    LINEARS,
    ExpertsSpec,
    MlpSpec,
    Row,
    expert_groups,
    group_name,
    mlp_rows,
    projections_of,
)
from exl2flow.model.config.family import Family, HeadNorms
from exl2flow.model.config.gptq_label import GptqLabel
from exl2flow.model.config.rope_spec import RopeSpec
from exl2flow.model.config.sublayer_spec import (
    ExpertGroup,
    NormRole,
    NormSpec,
    ProjectionSpec,
    SublayerKind,
    SublayerPart,
    SublayerSpec,
)

EXTENSIONS = ("linear_attention",)  # words in files that this version can read
GROUP_WEIGHTS = 1 << 27  # as many as the MLP of a 7B has


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer: its heads, what it does with scores, its positions.

    norm_after_rope: queries and keys are normalized after their rotation, not before.
    clip: what elements of queries, keys and values are clamped to ± of, before rotation, or None.
    has_gate: each head's queries are followed by the logits of what its output is multiplied by.
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
    clip: float | None = None
    has_gate: bool = False

    @property
    def width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, and as many values."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as its config describes it.

    attentions: of each layer, or how its state changes; mlps: of each layer; config: the raw
    `config.json`; quantization: what the files declare of it.
    drafting_layers: that files may have behind these, and that are left out.
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
    attentions: tuple[AttentionSpec | DeltaSpec, ...]
    mlps: tuple[MlpSpec | ExpertsSpec, ...]
    max_positions: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    has_unit_head: bool = False
    drafting_layers: int = 0
    group_weights: int | None = None
    config: Mapping[str, object] = field(compare=False, repr=False)
    quantization: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def sublayers(self) -> tuple[SublayerSpec, ...]:
        """All sublayers in walk order: attention 0, MLP 0, attention 1, …"""
        rows = [s for layer in range(self.num_layers) for s in _layer(self, layer)]
        return tuple(replace(sublayer, index=index) for index, sublayer in enumerate(rows))

    def experts_of(self, layer: int) -> int:
        """Return the number of experts of a layer, 0 if it has an MLP."""
        mlp = self.mlps[layer]
        return mlp.rule.experts if isinstance(mlp, ExpertsSpec) else 0

    @property
    def has_experts(self) -> bool:
        """Whether some layer has experts."""
        return any(isinstance(mlp, ExpertsSpec) for mlp in self.mlps)

    def undivided(self) -> "ModelSpec":
        """Return this model with all experts of a layer in one sublayer, as inference runs them."""
        return replace(self, group_weights=None)

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
        return tuple(dict.fromkeys(attention.rope for attention in self.attending))

    @property
    def attending(self) -> tuple[AttentionSpec, ...]:
        """The attention of the layers that have any, in their order."""
        return tuple(layer for layer in self.attentions if isinstance(layer, AttentionSpec))

    @property
    def deltas(self) -> tuple[DeltaSpec, ...]:
        """The layers with a state, in their order."""
        return tuple(layer for layer in self.attentions if isinstance(layer, DeltaSpec))

    def attention(self, layer: int) -> AttentionSpec:
        """Return the attention of a layer that has it."""
        found = self.attentions[layer]
        assert isinstance(found, AttentionSpec)
        return found

    @property
    def extension(self) -> tuple[str, ...]:
        """Features of a file of this model that exllamav2 does not know, see `EXTENSIONS`."""
        return ("linear_attention",) if self.deltas else ()

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
    def text_config(self) -> Mapping[str, object]:
        """The part of the raw config that holds the text model's keys."""
        block = self.config.get("text_config")
        return block if self.family.text_type and isinstance(block, Mapping) else self.config

    @property
    def quant_method(self) -> str | None:
        """The quantization that the config declares; tensor names alone decide how it loads."""
        method = self.quantization.get("quant_method")
        return None if method is None else str(method)

    @property
    def gptq_label(self) -> GptqLabel:
        """The form in which the files say that GPTQ matrices are stored."""
        return GptqLabel.of(self.quantization)

    def with_rope(
        self, *, scale: float | None = None, alpha: float | None = None, yarn: float | None = None
    ) -> "ModelSpec":
        """Return this model with positions divided by `scale`, NTK factor `alpha`, YaRN `yarn`.

        YaRN takes the place of the config's own kind, and stretches the original positions. Layers
        without positions stay as they are.

        Raises:
            ConfigError: a factor is not a number from 1 / `MOST_STRETCH` to `MOST_STRETCH`.
        """
        _check_stretch(scale=scale, alpha=alpha, yarn=yarn)
        rotating = [rope for rope in self.ropes if rope.rotary_dim]
        ropes = {rope: rope.scaled(scale=scale, alpha=alpha) for rope in rotating}
        reach = self.max_positions
        if yarn is not None and ropes:
            original = min(reach, *(rope.original_max_positions for rope in ropes))
            ropes = {old: rope.with_yarn(yarn, original) for old, rope in ropes.items()}
            reach = int(original * max(yarn, 1.0))
        layers = (
            replace(layer, rope=ropes.get(layer.rope, layer.rope))
            if isinstance(layer, AttentionSpec)
            else layer
            for layer in self.attentions
        )
        return replace(self, attentions=tuple(layers), max_positions=reach)


def _check_stretch(**factors: float | None) -> None:
    """Raise `ConfigError` if a factor would make positions or frequencies infinite."""
    for name, factor in factors.items():
        if factor is not None and not 1 / MOST_STRETCH <= factor <= MOST_STRETCH:  # nor NaN
            raise ConfigError(
                f"the factor `{name}` of the rotary embedding is {factor:g}; it must be from "
                f"{1 / MOST_STRETCH:g} to {MOST_STRETCH:g}"
            )


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
            shapes[sublayer.sinks] = (spec.attention(sublayer.layer_index).num_heads,)
        shapes |= dict(sublayer.plain.values())
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


def _layer(spec: ModelSpec, layer: int) -> tuple[SublayerSpec, ...]:
    """Return the sublayers of a layer, all of index 0."""
    mlp, mixer = spec.mlps[layer], _mixer(spec, layer)
    if isinstance(mlp, ExpertsSpec):
        row, start = spec.family.experts, f"{spec.layers_key}{layer}"
        assert row is not None
        groups = expert_groups(
            start, row, mlp, hidden_size=spec.hidden_size, most_weights=spec.group_weights
        )
        experts = (
            _sublayer(spec, layer, "experts", *p, name=group_name(start, row, group), group=group)
            for p, group in groups
        )
        return (mixer, *experts)
    if spec.family.is_parallel:
        parts = (
            _attention_part(spec, layer, inner="self_attn.inner"),
            _mlp_part(spec, layer, mlp, inner="mlp.inner"),
        )
        return (_sublayer(spec, layer, "parallel", *parts, name=f"{spec.layers_key}{layer}"),)
    return (mixer, _sublayer(spec, layer, "mlp", _mlp_part(spec, layer, mlp)))


def _mixer(spec: ModelSpec, layer: int) -> SublayerSpec:
    """Return the sublayer in which the tokens of a text meet."""
    delta = spec.attentions[layer]
    if isinstance(delta, AttentionSpec):
        return _sublayer(spec, layer, "attention", _attention_part(spec, layer))
    part = _delta_part(spec, layer, delta)
    plain = plain_tensors(part.name, delta, spec.hidden_size)
    return replace(_sublayer(spec, layer, "delta", part), plain=plain)


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


def _attention_part(spec: ModelSpec, layer: int, inner: str = "inner") -> SublayerPart:
    attention, hidden = spec.attention(layer), spec.hidden_size
    queries = attention.width * (2 if attention.has_gate else 1)
    rows: tuple[Row, ...] = (
        ("q", hidden, queries, attention.qkv_bias, "input"),
        ("k", hidden, attention.kv_width, attention.qkv_bias, "input"),
        ("v", hidden, attention.kv_width, attention.qkv_bias, "input"),
        ("o", attention.width, hidden, attention.o_bias, inner),
    )
    return _part(spec, f"{spec.layers_key}{layer}", "self_attn", rows)


def _delta_part(spec: ModelSpec, layer: int, delta: DeltaSpec) -> SublayerPart:
    hidden = spec.hidden_size
    out: Row = ("out", delta.width, hidden, False, "inner")
    rows: tuple[Row, ...] = (
        ("qkv", hidden, delta.channels, False, "input"),
        ("z", hidden, delta.width, False, "input"),
        out,
    )
    names = {"qkv": "in_proj_qkv", "z": "in_proj_z", "out": "out_proj"}
    if delta.is_packed:
        rows = ("qkv", hidden, delta.channels + delta.width, False, "input"), out
        names["qkv"] = "in_proj_qkvz"
    start = f"{spec.layers_key}{layer}"
    places = {role: f"linear_attn.{name}" for role, name in names.items()}
    return SublayerPart(
        name=f"{start}.linear_attn", projections=projections_of(start, places, rows)
    )


def _mlp_part(spec: ModelSpec, layer: int, mlp: MlpSpec, inner: str = "inner") -> SublayerPart:
    rows = mlp_rows(spec.hidden_size, mlp, first="input", inner=inner)
    return _part(spec, f"{spec.layers_key}{layer}", "mlp", rows)


def _part(spec: ModelSpec, layer: str, name: str, rows: tuple[Row, ...]) -> SublayerPart:
    names = LINEARS | dict(spec.family.linears)
    return SublayerPart(name=f"{layer}.{name}", projections=projections_of(layer, names, rows))


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
    if not isinstance(attention, AttentionSpec):
        return ()
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
