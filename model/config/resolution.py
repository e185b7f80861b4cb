"""Resolving: a model folder's `config.json`, in either form, to a `ModelSpec`."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from exl2flow.core.errors import SourceModelError, UnsupportedArchitecture
from exl2flow.model.config.experts_config import read_mlps
from exl2flow.model.config.families import FAMILIES
from exl2flow.model.config.family import Family, Multipliers
from exl2flow.model.config.fields import WIDEST, Fields, quoted
from exl2flow.model.config.gptq_label import declared_quantization
from exl2flow.model.config.layers_config import read_attentions
from exl2flow.model.config.spec import EXTENSIONS, GROUP_WEIGHTS, AttentionSpec, ModelSpec
from exl2flow.model.config.unsupported import PAGES, SUFFIX, need_of

# Far above every model that exists, and small enough that loops over them end at once.
MOST_LAYERS = 2048
MOST_TOKENS = 1 << 24  # of a vocabulary
NEAR = 0.75  # how alike names of architectures must be for advice, of 1
TEXT = "text_config"  # of a wrapper: the keys of its text model
NEUTRAL = (None, 0, 1)  # values of a key that change nothing; `False` is 0
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
UNSUPPORTED = (  # keys with which the graph would differ, where a family does not know them
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "clip_qkv",
    "use_qk_norm",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    *EXPERT_COUNTS,
    "scale_emb",
    "scale_depth",
    "scale_attn_by_inverse_layer_idx",
    "use_bidirectional_attention",
    "use_bias",
    "use_cla",
    "norm_head",
    "add_cross_attention",
)


EXPECTED = ("scale_attn_weights",)  # keys that must be true where they are present
HIDDEN_ACTS = {  # `hidden_act` → name of the kernels
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}


def resolve(source_dir: Path, *, wanted: str = "an EXL2 or Hugging Face model") -> ModelSpec:
    """Read `config.json`, in the form of transformers 4 or 5, of a dense or an EXL2 model.

    Args:
        source_dir: the model's folder.
        wanted: the kinds of models that the caller can use, for advice.

    Raises:
        UnsupportedArchitecture: no family row, or a variant that is not implemented.
        SourceModelError: a key is missing or impossible.
    """
    whole = Fields.load(source_dir / "config.json", wanted=wanted)
    family, config = _family(whole)
    config = replace(config, values=_values(config, family), names=_names(config, family))
    _check_keys(config, family)
    _check_extension(whole)
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    max_positions = config.integer("max_position_embeddings")
    attentions = read_attentions(config, family, num_layers=num_layers, max_positions=max_positions)
    reaches = [
        one.rope.reach(max_positions)
        for one in attentions
        if isinstance(one, AttentionSpec) and one.rope.rotary_dim
    ]
    bos_ids, eos_ids = (
        config.token_ids(key) or whole.token_ids(key) for key in ("bos_token_id", "eos_token_id")
    )
    embedding, residual, logits = _multipliers(config, family.multipliers)
    scale = family.residual_scale
    hidden_size = config.integer("hidden_size", most=WIDEST)
    return ModelSpec(
        family=family,
        source_dir=source_dir,
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=config.integer("vocab_size", most=MOST_TOKENS),
        norm_eps=config.number("rms_norm_eps", family.default_norm_eps),
        tied_head=any(part.flag("tie_word_embeddings", False) for part in (whole, config)),
        attentions=attentions,
        mlps=read_mlps(
            config, family, num_layers=num_layers, activation=_activation(config, family)
        ),
        embedding_multiplier=embedding * scale,
        residual_multiplier=residual * (1.0 if family.post_norms else scale),
        logit_multiplier=logits,
        logit_softcap=config.optional(family.logit_softcap_key),
        has_unit_head=_has_unit_head(config, family),
        drafting_layers=_drafting_layers(config, family),
        group_weights=GROUP_WEIGHTS,
        max_positions=min(reaches, default=max_positions),
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=eos_ids,
        config=whole.values,
        quantization=declared_quantization(source_dir, whole.values, config.values),
    )


def _family(config: Fields) -> tuple[Family, Fields]:
    """Return the row, and the part of the config that holds the text model's keys."""
    (name,) = config.texts("architectures", 1)
    rows = {kind: row for (known, kind), row in FAMILIES.items() if known == name}
    if None in rows:
        return rows[None], config
    if rows:
        return _wrapped(config, name, rows)
    raise UnsupportedArchitecture(
        f"architecture `{name}` in `{config.path}` is not supported{_reason(name)}; {PAGES}"
    )


def _reason(name: str) -> str:
    """Return what an architecture needs, if that is known, else the nearest names if any are."""
    if need := need_of(name):
        return f": it needs {need}"
    stems = {SUFFIX.sub("", row).lower(): row for row, _ in FAMILIES}
    near = difflib.get_close_matches(SUFFIX.sub("", name).lower(), stems, n=2, cutoff=NEAR)
    return f"; nearest are {quoted(stems[stem] for stem in near)}" if near else ""


def _wrapped(config: Fields, name: str, rows: dict[str | None, Family]) -> tuple[Family, Fields]:
    """Return the row of a wrapper for its text model, and that model's config."""
    if not config.has(TEXT):
        flat = [row for row in rows.values() if row.is_flat_too]
        if flat and config.has("hidden_size"):
            return flat[0], config
        raise SourceModelError(
            f"`{TEXT}` is missing in `{config.path}`, although `{name}` wraps a text model; fetch "
            "the file again"
        )
    inner = config.inner(TEXT)
    kind = inner.text("model_type")
    kinds = rows | {row.earlier_text_type: row for row in rows.values() if row.earlier_text_type}
    if kind not in kinds:
        need = need_of(kind)
        why = f": it needs {need}" if need else ""
        supported = quoted(str(row) for row in rows)
        raise UnsupportedArchitecture(
            f"`{name}` around a text model of type `{kind}` in `{config.path}` is not supported"
            f"{why}; supported around it: {supported}; {PAGES}"
        )
    return kinds[kind], inner


def _values(config: Fields, family: Family) -> dict[str, object]:
    """Return the config's values by the keys of Llama's configs, with the family's defaults."""
    stored = {**dict(family.defaults), **_in_sections(config, family)[0], **config.values}
    return stored | {key: stored[name] for key, name in family.keys if name in stored}


def _names(config: Fields, family: Family) -> dict[str, str]:
    """Return how the file calls keys, by those of Llama's configs."""
    is_llamas = {key for key in config.values if config.has(key)}
    inner = {
        key: name for key, name in _in_sections(config, family)[1].items() if key not in is_llamas
    }
    known = is_llamas | {*inner}
    return inner | {
        key: inner.get(name, name)
        for key, name in family.keys
        if name in known or key not in is_llamas
    }


def _in_sections(config: Fields, family: Family) -> tuple[dict[str, object], dict[str, str]]:
    """Return values of keys that lie in objects of a config, and the keys with these objects."""
    values, names = dict[str, object](), dict[str, str]()
    for section in family.sections:
        inner = config
        for part in section.split("."):
            inner = inner.inner(part)
        values |= inner.values
        names |= {key: f"{section}.{key}" for key in inner.values}
    return values, names


def _check_keys(config: Fields, family: Family) -> None:
    """Refuse values that change the graph in ways that it does not know."""
    known = (*family.known, *(EXPERT_COUNTS if family.experts else ()))
    for key in (*UNSUPPORTED, *EXPECTED):
        value = config.values.get(key)
        is_neutral = value is not True and value in NEUTRAL
        if key in EXPECTED:
            is_neutral = value in (None, True)
        if key not in known and not is_neutral:
            raise _refused(config, key)
    for key, values in family.fixed:
        if config.has(key) and config.values[key] not in values:
            raise _refused(config, key)


def _check_extension(config: Fields) -> None:
    """Refuse EXL2 files with parts that this version cannot read."""
    block = config.values.get("quantization_config")
    words = block.get("extension", []) if isinstance(block, Mapping) else []
    unknown = (
        [word for word in words if word not in EXTENSIONS] if isinstance(words, list) else [words]
    )
    if unknown:
        raise UnsupportedArchitecture(
            f"`quantization_config.extension` in `{config.path}` holds "
            f"{quoted(map(str, unknown))}, which this version does not know; it knows "
            f"{quoted(EXTENSIONS)}: update exl2flow"
        )


def _refused(config: Fields, key: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{config.named(key)} in `{config.path}` is {config.values[key]!r}, which is not "
        "supported: the model would compute something else"
    )


def _activation(config: Fields, family: Family) -> str:
    name = config.text("hidden_act", family.default_activation)
    if name not in HIDDEN_ACTS:
        raise UnsupportedArchitecture(
            f"{config.named('hidden_act')} `{name}` in `{config.path}` is not supported; supported "
            f"are {quoted(HIDDEN_ACTS)}"
        )
    return HIDDEN_ACTS[name]


def _multipliers(config: Fields, rule: Multipliers) -> tuple[float, float, float]:
    """Return what embedding, outputs of sublayers, and logits are multiplied by."""
    match rule:
        case Multipliers.NONE:
            return 1.0, 1.0, 1.0
        case Multipliers.GEMMA:
            return math.sqrt(config.integer("hidden_size")), 1.0, 1.0
        case Multipliers.COHERE:
            return 1.0, 1.0, config.number("logit_scale", 1.0)
        case Multipliers.GRANITE:
            keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
            embedding, residual, divisor = (config.number(key, 1.0) for key in keys)
            return embedding, residual, 1 / divisor
        case Multipliers.MINICPM:
            hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
            depth = config.number("scale_depth", 1.0) / math.sqrt(layers)
            base = config.number("dim_model_base", 1.0)
            return config.number("scale_emb", 1.0), depth, base / hidden


def _drafting_layers(config: Fields, family: Family) -> int:
    if family.drafting_key is None:
        return 0
    return config.integer(family.drafting_key, family.default_drafting, least=0, most=MOST_LAYERS)


def _has_unit_head(config: Fields, family: Family) -> bool:
    key = family.unit_head_key
    if key is None or not config.has(key):
        return False
    value = config.values[key]
    return value if isinstance(value, bool) else bool(config.integer(key, least=0, most=1))
