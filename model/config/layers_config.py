"""Read the per-layer attention settings of `config.json`: heads, windows, scores, positions."""

from dataclasses import replace
from functools import partial

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.kernels import AttentionRule
from exl2flow.model.config.delta_spec import LINEAR, DeltaSpec, read_delta
from exl2flow.model.config.family import Family, HeadNorms, NopeRule, WindowRule
from exl2flow.model.config.fields import WIDEST, Fields, quoted
from exl2flow.model.config.rope_spec import FULL, LAYER_TYPES, SLIDING, RopeSpec, read_ropes
from exl2flow.model.config.spec import AttentionSpec
from exl2flow.model.config.unsupported import LAYER_NEEDS, PAGES

MOST_HEADS = 1 << 14  # also dimensions of a head
NAMES = {"attention": FULL}  # layer types in the words of earlier configs
PATTERN = "sliding_window_pattern"
CHUNKED = "chunked_attention"
LETTERS = {"G": FULL, "L": SLIDING}  # of patterns that are written out

Windows = tuple[int | None, ...]


def read_attentions(
    config: Fields, family: Family, *, num_layers: int, max_positions: int
) -> tuple[AttentionSpec | DeltaSpec, ...]:
    """Read the keys of attention, rope and layers with a state, in either config form.

    Raises:
        UnsupportedArchitecture: a kind of layer or rope that is not implemented.
        SourceModelError: a key is missing or impossible.
    """
    types = _layer_types(config, family, num_layers)
    windows = _windows(config, family, types)
    layer = _common(config, family, max_positions)
    thetas = _thetas(config, family, num_layers)
    rotated = _rotated(config, family, windows) if thetas is None else tuple(map(bool, thetas))
    chunks = _chunks(config, family, types, rotated)
    nowhere = _far_queries(config, family, layer.rope)
    read = partial(read_ropes, family=family, head_dim=layer.head_dim, max_positions=max_positions)
    of_theta = {
        theta: read(config if theta is None else _at_theta(config, theta))
        for theta in {*(thetas or [None])}
        if any(rotated) and theta != 0
    }
    is_bare = layer.head_norms is HeadNorms.BARE
    ropes = (
        of_theta.get(theta, (nowhere, nowhere))[kind == SLIDING]
        for kind, theta in zip(types, thetas or [None] * num_layers, strict=True)
    )
    layers: tuple[AttentionSpec | DeltaSpec, ...] = tuple(
        replace(
            layer,
            rule=replace(layer.rule, window=window, chunk=chunk),
            rope=rope if rotates else nowhere,
            head_norms=HeadNorms.NONE if is_bare and not rotates else layer.head_norms,
        )
        for window, chunk, rope, rotates in zip(windows, chunks, ropes, rotated, strict=True)
    )
    if LINEAR not in types:
        return layers
    if FULL not in types:
        key = "layer_types" if config.has("layer_types") else "full_attention_interval"
        raise SourceModelError(
            f"`{config.prefix}{key}` in `{config.path}` gives none of {num_layers} layers "
            f"`{FULL}`; models with a state that this reads have at least one"
        )
    delta = read_delta(config, is_packed=family.packed_state)
    return tuple(delta if kind == LINEAR else one for one, kind in zip(layers, types, strict=True))


def bias_of(config: Fields, rule: bool | str) -> bool:
    """Return whether there are biases by the rule of a row."""
    return config.flag(rule, False) if isinstance(rule, str) else rule


def _common(config: Fields, family: Family, max_positions: int) -> AttentionSpec:
    """Return what all layers share, without window and positions."""
    num_heads = config.integer("num_attention_heads", most=MOST_HEADS)
    is_single = family.single_head_key is not None and config.flag(family.single_head_key, True)
    default = 1 if is_single else num_heads
    num_kv_heads = config.integer("num_key_value_heads", default, most=MOST_HEADS)
    if num_heads % num_kv_heads:
        raise SourceModelError(
            f"{config.named('num_key_value_heads')} in `{config.path}` is {num_kv_heads}; it must "
            f"divide {config.named('num_attention_heads')}, {num_heads}"
        )
    head_dim = _head_dim(config, family, num_heads)
    scale, head_norms = head_dim**-0.5, family.head_norms
    if family.score_scale_key is not None:
        scale = config.number(family.score_scale_key) ** family.score_scale_power
    if isinstance(head_norms, tuple):
        key, norms = head_norms
        head_norms = norms if config.flag(key, False) else HeadNorms.NONE
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rule=AttentionRule(scale=scale, softcap=config.optional(family.softcap_key)),
        rope=RopeSpec.none(max_positions),
        norm_after_rope=family.norm_after_rope,
        qkv_bias=bias_of(config, family.qkv_bias),
        o_bias=bias_of(config, family.o_bias),
        head_norms=head_norms,
        clip=config.optional(family.clip_key),
        has_gate=family.has_gate,
    )


def _head_dim(config: Fields, family: Family, num_heads: int) -> int:
    """Return `head_dim`, by default the family's or hidden size / heads."""
    if family.default_head_dim or config.has("head_dim"):
        return config.integer("head_dim", family.default_head_dim, most=MOST_HEADS)
    hidden_size = config.integer("hidden_size", most=WIDEST)
    if hidden_size % num_heads:
        raise SourceModelError(
            f"{config.named('num_attention_heads')} in `{config.path}` is {num_heads}; it must "
            f"divide {config.named('hidden_size')}, {hidden_size}, or `head_dim` must be there"
        )
    return hidden_size // num_heads


def _layer_types(config: Fields, family: Family, num_layers: int) -> tuple[str, ...]:
    """Return each layer's type: as listed, by the pattern, or the family's only one."""
    if not config.has("layer_types"):
        return _patterned(config, family, num_layers)
    listed = config.texts("layer_types", num_layers)
    types = tuple(NAMES.get(kind, kind) for kind in listed)
    known = LAYER_TYPES if family.chunk_key is None else (*LAYER_TYPES, CHUNKED)
    known = (FULL, LINEAR) if family.has_state else known
    unknown = [kind for kind in dict.fromkeys(types) if kind not in known]
    if unknown:
        needs = dict.fromkeys(LAYER_NEEDS[kind] for kind in unknown if kind in LAYER_NEEDS)
        why = f", which needs {' and '.join(needs)}" if needs else ""
        raise UnsupportedArchitecture(
            f"`{config.prefix}layer_types` in `{config.path}` holds {quoted(unknown)}{why}; "
            f"supported are {quoted(known)}; {PAGES}"
        )
    return types


def _patterned(config: Fields, family: Family, num_layers: int) -> tuple[str, ...]:
    """Return the types of a pattern: letters that repeat, or every n-th layer is a full one."""
    if family.has_state:
        every = config.integer("full_attention_interval", 4)
        return tuple(LINEAR if layer % every else FULL for layer in range(1, num_layers + 1))
    if family.window_rule is not WindowRule.LAYER_TYPES:
        return (FULL,) * num_layers
    if not family.default_window_pattern:
        return (SLIDING,) * num_layers
    given = config.values.get(PATTERN, family.default_window_pattern)
    if given is None:
        return (FULL,) * num_layers
    if isinstance(given, str):
        if not given or set(given) - set(LETTERS):
            raise config.refusal(PATTERN, given, f"a number, or {quoted(LETTERS)} repeated")
        letters = (given * num_layers)[: num_layers - 1] + "G"  # the last layer is a full one
        return tuple(LETTERS[letter] for letter in letters)
    every = config.integer(PATTERN, family.default_window_pattern)
    first = 0 if family.pattern_begins_full else 1
    return tuple(SLIDING if layer % every else FULL for layer in range(first, num_layers + first))


def _window(config: Fields, family: Family) -> int | None:
    """Return the window of the layers that have one; null, unlike an absent key, means none."""
    if "sliding_window" not in config.values:
        return family.default_window
    return config.integer("sliding_window") if config.has("sliding_window") else None


def _windows(config: Fields, family: Family, types: tuple[str, ...]) -> Windows:
    """Return each layer's window by the family's rule, None without one."""
    rule, none = family.window_rule, (None,) * len(types)
    is_optional = rule in (WindowRule.UPPER_LAYERS, WindowRule.NOPE_LAYERS)
    if is_optional and not config.flag("use_sliding_window", False):
        if rule is WindowRule.NOPE_LAYERS and SLIDING in types:
            # in transformers the way to compute attention decides
            raise SourceModelError(
                f"`{config.prefix}layer_types` in `{config.path}` holds `{SLIDING}`, but "
                "`use_sliding_window` is not true; correct the one that is wrong"
            )
        return none
    if rule is WindowRule.NONE:
        return none
    window = _window(config, family)
    if rule is WindowRule.ALL_LAYERS:
        return (window,) * len(types)
    if rule is WindowRule.LAYER_TYPES or config.has("layer_types"):
        return tuple(window if kind == SLIDING else None for kind in types)
    if rule is WindowRule.UPPER_LAYERS:
        first = config.integer("max_window_layers", family.default_max_window_layers, least=0)
        return tuple(window if layer >= first else None for layer in range(len(types)))
    return tuple(None if rotates else window for rotates in _listed(config, len(types)))


def _rotated(config: Fields, family: Family, windows: Windows) -> tuple[bool, ...]:
    """Return by the family's rule which layers rotate queries and keys."""
    rule, count = family.nope_rule, len(windows)
    if rule is NopeRule.LISTED:
        return _listed(config, count)
    if rule is NopeRule.POSITION_TYPE:
        return (_has_rope(config),) * count
    is_hybrid = rule is NopeRule.FULL_LAYERS_OF_HYBRIDS and _window(config, family) is not None
    if rule is NopeRule.FULL_LAYERS or is_hybrid:
        return tuple(window is not None for window in windows)
    return (rule is not NopeRule.ALL_LAYERS,) * count


def _thetas(config: Fields, family: Family, num_layers: int) -> tuple[float, ...] | None:
    """Return the base of each layer's rope, 0 where it has no positions; None: none is listed."""
    key = family.layer_theta_key
    if key is None or not config.has(key):
        return None
    return config.numbers(key, num_layers, above=-1.0)


def _at_theta(config: Fields, theta: float) -> Fields:
    """Return a config whose only rope has this base."""
    rope = {**config.inner("rope_parameters").values, "rope_theta": theta}
    return replace(config, values={**config.values, "rope_parameters": rope, "rope_theta": theta})


def _chunks(
    config: Fields, family: Family, types: tuple[str, ...], rotated: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Return the positions of each layer's chunks, None where the text is not cut."""
    if family.chunk_key is None or not config.has(family.chunk_key):
        return (None,) * len(types)
    chunk, is_listed = config.integer(family.chunk_key), config.has("layer_types")
    return tuple(
        chunk if (kind == CHUNKED if is_listed else rotates) else None
        for kind, rotates in zip(types, rotated, strict=True)
    )


def _far_queries(config: Fields, family: Family, nowhere: RopeSpec) -> RopeSpec:
    """Return the rope of layers without positions, whose queries may grow with these."""
    if family.far_query_keys is None:
        return nowhere
    key, beta, positions = family.far_query_keys
    given = config.values.get(key, True)  # configs first said 4
    if not (given if isinstance(given, bool) else config.integer(key, 0, least=0)):
        return nowhere
    return replace(
        nowhere,
        original_max_positions=config.integer(positions, 8192),
        query_beta=config.number(beta, 0.1),
        query_offset=1,
    )


def _listed(config: Fields, count: int) -> tuple[bool, ...]:
    if config.values.get("no_rope_layers"):  # 1: the layer has a rope
        return tuple(map(bool, config.integers("no_rope_layers", count, least=0, most=1)))
    every = config.integer("no_rope_layer_interval", 4)
    return tuple(layer % every != 0 for layer in range(1, count + 1))


def _has_rope(config: Fields) -> bool:
    key = "position_embedding_type"
    name = config.text(key, "nope")
    if name not in ("rope", "nope"):
        raise UnsupportedArchitecture(
            f"`{config.prefix}{key}` in `{config.path}` is `{name}`; supported are `rope`, `nope`"
        )
    return name == "rope"
