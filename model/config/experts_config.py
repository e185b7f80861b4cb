"""Read from `config.json` which layers have experts, how many, of what shape, and their router."""

from dataclasses import replace
from math import prod

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.kernels import RouterRule
from exl2flow.model.config.experts_spec import ExpertsSpec, MlpSpec
from exl2flow.model.config.family import DenseLayers, Experts, Family
from exl2flow.model.config.fields import WIDEST, Fields, quoted
from exl2flow.model.config.layers_config import bias_of

MOST_EXPERTS = 1 << 12  # that can be
GROUP_SCORES = 2  # a group is ranked by the sum of this many scores


def read_mlps(
    config: Fields, family: Family, *, num_layers: int, activation: str
) -> tuple[MlpSpec | ExpertsSpec, ...]:
    """Return the MLP or the experts of each layer.

    Raises:
        SourceModelError: a key is missing or impossible.
        UnsupportedArchitecture: the router has scores of another kind.
    """
    row = family.experts
    if row is None:
        return (_dense(config, family, activation),) * num_layers
    _check_scores(config, row)
    of_layers = [_of_layer(config, row, layer) for layer in range(num_layers)]
    has_experts = [layer_has_experts(config, row, layer) for layer in range(num_layers)]
    return tuple(
        _experts(own, family, row, activation) if has else _dense(config, family, activation)
        for own, has in zip(of_layers, has_experts, strict=True)
    )


def layer_has_experts(config: Fields, row: Experts, layer: int) -> bool:
    """Return whether a layer has experts, by the rule of a row."""
    match row.dense:
        case DenseLayers.NONE:
            return True
        case DenseLayers.FIRST:
            count = config.integer("num_hidden_layers")
            return layer >= config.integer("first_k_dense_replace", 0, least=0, most=count)
        case DenseLayers.LISTED:
            step = config.integer("decoder_sparse_step", 1)
            return (layer + 1) % step == 0 and layer not in _listed(config, "mlp_only_layers")
        case DenseLayers.UNLISTED:
            if isinstance(config.values.get("moe_layers"), list):
                return layer in _listed(config, "moe_layers")
            return (layer + 1) % config.integer("interleave_moe_layer_step", 1) == 0
        case DenseLayers.INTERVAL:
            most = config.integer("num_hidden_layers") - 1
            first = config.integer("moe_layer_start_index", 0, least=0, most=most)
            last = config.integer("moe_layer_end_index", -1, least=-1, most=most)
            every = config.integer("moe_layer_interval", 1)
            is_within = first <= layer <= (most if last == -1 else last)
            return is_within and (layer + 1) % every == 0


def _of_layer(config: Fields, row: Experts, layer: int) -> Fields:
    """Return the config with the values of a layer, where keys list those of all layers."""
    own, count = dict[str, object](), config.integer("num_hidden_layers")
    for key in row.listed_keys:
        if isinstance(config.values.get(key), list):
            own[key] = config.integers(key, count, least=1, most=WIDEST)[layer]
    return replace(config, values={**config.values, **own}) if own else config


def _check_scores(config: Fields, row: Experts) -> None:
    """Refuse scores that are not those of the family.

    Raises:
        UnsupportedArchitecture: `scoring_func` has another name.
    """
    known = (str(row.scores), *row.score_names)
    name = config.text("scoring_func", known[0])
    if name not in known:
        raise UnsupportedArchitecture(
            f"{config.named('scoring_func')} in `{config.path}` is `{name}`; supported for this "
            f"family: {quoted(known)}"
        )


def _listed(config: Fields, key: str) -> tuple[int, ...]:
    """Return a list of layers, which may be absent."""
    listed = config.values.get(key)
    if not isinstance(listed, list):
        return ()
    most = config.integer("num_hidden_layers") - 1
    return config.integers(key, len(listed), least=0, most=most)


def _dense(config: Fields, family: Family, activation: str) -> MlpSpec:
    key = "intermediate_size" if family.experts is None else family.experts.dense_width_key
    inner = family.default_inner * config.integer("hidden_size", most=WIDEST) or None
    return MlpSpec(
        intermediate_size=config.integer(key, inner, most=WIDEST),
        activation=activation,
        has_bias=bias_of(config, family.mlp_bias),
        gated=family.is_gated,
    )


def _experts(config: Fields, family: Family, row: Experts, activation: str) -> ExpertsSpec:
    expert = MlpSpec(
        intermediate_size=config.integer(row.width_key, most=WIDEST),
        activation=row.activation or activation,
        has_bias=bias_of(config, row.bias),
        gated=family.is_gated,
    )
    width = prod(config.integer(key, 0, least=0, most=WIDEST) for key in row.shared_width_keys)
    shared = None
    if row.shared is not None and width:
        bias = bias_of(config, family.mlp_bias)
        shared = replace(expert, intermediate_size=width, has_bias=bias)
    return ExpertsSpec(rule=_rule(config, row), expert=expert, shared=shared)


def _rule(config: Fields, row: Experts) -> RouterRule:
    counted = next(filter(config.has, row.count_keys), row.count_keys[0])
    experts = config.integer(counted, row.default_count, most=MOST_EXPERTS)
    top = config.integer(row.top_key, most=MOST_EXPERTS)
    if top > experts:
        raise SourceModelError(
            f"{config.named(row.top_key)} in `{config.path}` is {top}; it must be at most "
            f"{config.named(counted)}, {experts}"
        )
    groups, top_groups = _groups(config, row, experts, top)
    floor = row.least_sum
    return RouterRule(
        experts=experts,
        top=top,
        scores=row.scores,
        norm=_norm(config, row),
        least_norm=config.number(floor, 1e-12) if isinstance(floor, str) else floor,
        scaling=1.0 if row.scaling_key is None else config.number(row.scaling_key, 1.0),
        groups=groups,
        top_groups=top_groups,
        scales_input=row.scales_input,
    )


def _norm(config: Fields, row: Experts) -> float | None:
    """Return the power of the norm that weights are divided by; None: they are not divided."""
    if row.norm_power_key is not None:
        return config.optional(row.norm_power_key)
    return 1.0 if bias_of(config, row.is_normalized) else None


def _groups(config: Fields, row: Experts, experts: int, top: int) -> tuple[int, int]:
    """Return the number of groups, and of those of which experts are chosen."""
    if row.group_keys is None:
        return 1, 1
    count, chosen = row.group_keys
    groups, top_groups = config.integer(count, 1), config.integer(chosen, 1)
    if groups == 1:
        return 1, 1
    if experts % groups or experts // groups < GROUP_SCORES:
        raise SourceModelError(
            f"{config.named(count)} in `{config.path}` is {groups}; it must divide "
            f"{experts}, the number of experts, into groups of {GROUP_SCORES} or more"
        )
    if top_groups > groups or top_groups * (experts // groups) < top:
        raise SourceModelError(
            f"{config.named(chosen)} in `{config.path}` is {top_groups}; it must be at most "
            f"{groups}, and that many groups must hold {top} experts"
        )
    return groups, top_groups
