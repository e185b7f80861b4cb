"""Read the rotary position embedding of `config.json`, in one form for all kinds.

Understands `rope_theta` and `rope_scaling` (transformers 4) as well as `rope_parameters`
(transformers 5).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.model.config.family import Family
from exl2flow.model.config.fields import MOST, Fields

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
QUERY_BETA, ALPHA, PARTIAL = "llama_4_scaling_beta", "alpha", "partial_rotary_factor"


class RopeKind(StrEnum):
    """The derivation of inverse frequencies from the base."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


# mrope: for text, whose three positions of a token are one
_ALIASES = {"su": RopeKind.LONGROPE, "mrope": RopeKind.DEFAULT}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of all kinds of rope; a kind leaves those of others neutral.

    `factor` is the stretch of the context, `original_max_positions` the length before it
    (for dynamic NTK `max_position_embeddings`, as in transformers),
    `attention_factor` multiplies cosines and sines (None: derived from the stretch),
    `position_scale` divides positions on top of the kind's own rule.
    `rotary_dim` is 0 in layers without positions.
    `interleaved`: pairs are (2i, 2i + 1), not (i, i + d/2).
    `query_beta`: queries at position p are multiplied by 1 + beta · ln(1 + floor(n / original)),
    n = p + `query_offset`.
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    original_max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    position_scale: float = 1.0
    interleaved: bool = False
    query_beta: float = 0.0
    query_offset: int = 0

    @classmethod
    def none(cls, max_positions: int) -> "RopeSpec":
        """Return the rope of layers without positions, which rotates nothing."""
        return cls(
            kind=RopeKind.DEFAULT, theta=1.0, rotary_dim=0, original_max_positions=max_positions
        )

    def reach(self, max_positions: int) -> int:
        """Return how many positions a model has whose config states `max_positions`.

        Configs state the stretched length, except with dynamic NTK, which stretches as it goes.
        """
        is_dynamic = self.kind is RopeKind.DYNAMIC
        stretched = min(int(max_positions * max(self.factor, 1.0)), MOST)
        return stretched if is_dynamic else max_positions

    def scaled(self, *, scale: float | None, alpha: float | None) -> "RopeSpec":
        """Return this with positions divided by `scale` and the base stretched for NTK `alpha`.

        base ← base · alpha^(d / (d - 2)), d the rotated dimensions.
        """
        exponent = self.rotary_dim / max(self.rotary_dim - 2, 1)
        return replace(
            self,
            position_scale=self.position_scale * (scale or 1.0),
            theta=self.theta * (alpha or 1.0) ** exponent,
        )

    def with_yarn(self, factor: float, original: int) -> "RopeSpec":
        """Return YaRN with default bounds, stretching `original` positions by a factor."""
        return RopeSpec(
            kind=RopeKind.YARN,
            theta=self.theta,
            rotary_dim=self.rotary_dim,
            original_max_positions=original,
            factor=factor,
            position_scale=self.position_scale,
            interleaved=self.interleaved,
            query_beta=self.query_beta,
        )


def read_ropes(
    config: Fields, family: Family, *, head_dim: int, max_positions: int
) -> tuple[RopeSpec, RopeSpec]:
    """Read the rope keys of either config form: the ropes of full and of sliding layers.

    Raises:
        UnsupportedArchitecture: a kind that is not implemented.
        SourceModelError: a key is missing or impossible.
    """
    is_old = config.values.get("rope_scaling") not in (None, {})  # an empty one says nothing
    key = "rope_scaling" if is_old else "rope_parameters"
    full = config.inner(key)
    local = replace(full, values={})
    if family.local_theta_key is not None:
        nested = config.inner("rope_parameters")
        if any(kind in nested.values for kind in LAYER_TYPES):
            full = full if key == "rope_scaling" else nested.inner(FULL)
            local = nested.inner(SLIDING)
    read = partial(_read, config, family, head_dim=head_dim, max_positions=max_positions)
    rope = read(full, ("rope_theta", family.default_theta))
    if family.local_theta_key is None:
        return rope, rope
    return rope, read(local, (family.local_theta_key, family.default_local_theta))


def _read(
    config: Fields,
    family: Family,
    rope: Fields,
    theta: tuple[str, float],
    *,
    head_dim: int,
    max_positions: int,
) -> RopeSpec:
    """Read one rope; `theta`: the key of its base in the config itself, and the default."""
    kind = _kind(rope)
    source, theta_key = (rope, "rope_theta") if rope.has("rope_theta") else (config, theta[0])
    if source is rope and "rope_theta" in config.names:
        _check_theta(config, rope)
    original = config if config.has("original_max_position_embeddings") else rope
    common = RopeSpec(
        kind=kind,
        theta=source.number(theta_key, theta[1], above=1.0),
        rotary_dim=_rotary_dim(config, family, rope, head_dim),
        original_max_positions=max_positions
        if kind is RopeKind.DYNAMIC
        else original.integer("original_max_position_embeddings", max_positions, least=2),
        interleaved=family.interleaved,
        query_beta=_query_beta(family, rope),
    )
    if kind is RopeKind.DYNAMIC and _is_set(rope, ALPHA):
        if not family.has_alpha:
            raise _unsupported(rope, ALPHA)
        stretched = common.scaled(scale=None, alpha=rope.number(ALPHA))
        return replace(stretched, kind=RopeKind.DEFAULT)
    stretch = max_positions / common.original_max_positions
    return replace(common, **_details(kind, rope, common.rotary_dim, stretch))


def _check_theta(config: Fields, rope: Fields) -> None:
    """Refuse a base that contradicts the family's own key: transformers 5 writes both."""
    known, written = config.optional("rope_theta"), rope.number("rope_theta")
    if known is not None and known != written:
        raise SourceModelError(
            f"{config.named('rope_theta')} in `{config.path}` is {known:g}, but "
            f"{rope.named('rope_theta')}, which transformers 5 adds, {written:g}; set both to that "
            "of the model as it was published"
        )


def _rotary_dim(config: Fields, family: Family, rope: Fields, head_dim: int) -> int:
    source = rope if rope.has(PARTIAL) else config
    default = family.default_partial
    share = source.number(PARTIAL, 1.0 if default is None else default)
    rotary_dim = int(head_dim * share)
    if family.rotary_key is not None and not source.has(PARTIAL):
        rotary_dim = config.integer(family.rotary_key, rotary_dim)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise SourceModelError(
            f"`{config.path}` asks to rotate {rotary_dim} of {head_dim} dimensions of a head; that "
            "must be an even number and not exceed the head"
        )
    if default is None and share != 1.0:
        raise _unsupported(source, PARTIAL)
    return rotary_dim


def _query_beta(family: Family, rope: Fields) -> float:
    key = family.query_beta_key
    if key is None and _is_set(rope, QUERY_BETA):
        raise _unsupported(rope, QUERY_BETA)
    return rope.number(key) if key is not None and _is_set(rope, key) else 0.0


def _unsupported(rope: Fields, key: str) -> UnsupportedArchitecture:
    """Return the error for a key that the family's rope does not have."""
    return UnsupportedArchitecture(
        f"`{rope.prefix}{key}` in `{rope.path}` is {rope.values[key]!r}, which is not supported: "
        "the model would compute something else"
    )


def _kind(rope: Fields) -> RopeKind:
    """Return the kind, spelled `rope_type` or, before transformers 4.43, `type`."""
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UnsupportedArchitecture(
            f"`{rope.prefix.rstrip('.')}` in `{rope.path}` differs between layers; this family has "
            "one rotary embedding for all layers"
        )
    name = rope.text("rope_type" if rope.has("rope_type") else "type", RopeKind.DEFAULT)
    try:
        return _ALIASES.get(name) or RopeKind(name)
    except ValueError:
        known = ", ".join(f"`{kind}`" for kind in RopeKind)
        raise UnsupportedArchitecture(
            f"rope type `{name}` in `{rope.path}` is not supported; supported are {known}"
        ) from None


def _details(kind: RopeKind, rope: Fields, rotary_dim: int, stretch: float) -> dict[str, Any]:
    """Read the fields of `RopeSpec` that only this kind has."""
    match kind:
        case RopeKind.DEFAULT:
            return {}
        case RopeKind.LINEAR:
            return {"factor": rope.number("factor")}
        case RopeKind.DYNAMIC:
            if rotary_dim <= 2:
                raise SourceModelError(
                    f"`{rope.path}` asks to rotate {rotary_dim} dimensions of a head; rope type "
                    "`dynamic` needs more than 2"
                )
            return {"factor": rope.number("factor")}
        case RopeKind.LLAMA3:
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low > high:
                raise SourceModelError(
                    f"`{rope.prefix}low_freq_factor` in `{rope.path}` is {low:g}; it must not "
                    f"exceed `high_freq_factor`, {high:g}"
                )
            factor = rope.number("factor")
            return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        case RopeKind.YARN:
            optional = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
            given = {key: rope.number(key) for key in optional if _is_set(rope, key)}
            truncate = rope.flag("truncate", True)
            return {"factor": rope.number("factor", stretch), "truncate": truncate, **given}
        case RopeKind.LONGROPE:
            given = {key: rope.number(key) for key in ("attention_factor",) if rope.has(key)}
            return {
                "factor": rope.number("factor", stretch),
                "short_factors": rope.numbers("short_factor", rotary_dim // 2),
                "long_factors": rope.numbers("long_factor", rotary_dim // 2),
                **given,
            }


def _is_set(rope: Fields, key: str) -> bool:
    """Tell whether an optional number is given; 0 stands for absent, as in transformers."""
    return bool(rope.values.get(key))
