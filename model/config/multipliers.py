"""Read the multipliers of embedding, sublayer outputs and logits from `config.json`."""

import math
from collections.abc import Callable

from exl2flow.model.config.family import Multipliers
from exl2flow.model.config.fields import Fields


def read_multipliers(config: Fields, rule: Multipliers) -> tuple[float, float, float]:
    """Return what embedding, outputs of sublayers, and logits are multiplied by."""
    return _READERS[rule](config)


def _no_multipliers(config: Fields) -> tuple[float, float, float]:
    return 1.0, 1.0, 1.0


def _gemma_multipliers(config: Fields) -> tuple[float, float, float]:
    return math.sqrt(config.integer("hidden_size")), 1.0, 1.0


def _cohere_multipliers(config: Fields) -> tuple[float, float, float]:
    return 1.0, 1.0, config.number("logit_scale", 1.0)


def _granite_multipliers(config: Fields) -> tuple[float, float, float]:
    embedding, residual, divisor = (
        config.number(key, 1.0) for key in MULTIPLIER_KEYS[Multipliers.GRANITE]
    )
    return embedding, residual, 1 / divisor


def _minicpm_multipliers(config: Fields) -> tuple[float, float, float]:
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    depth = config.number("scale_depth", 1.0) / math.sqrt(layers)
    return config.number("scale_emb", 1.0), depth, config.number("dim_model_base", 1.0) / hidden


MULTIPLIER_KEYS: dict[Multipliers, tuple[str, ...]] = {
    Multipliers.NONE: (),
    Multipliers.GEMMA: (),
    Multipliers.COHERE: ("logit_scale",),
    Multipliers.GRANITE: ("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    Multipliers.MINICPM: ("scale_emb", "scale_depth", "dim_model_base"),
}
_READERS: dict[Multipliers, Callable[[Fields], tuple[float, float, float]]] = {
    Multipliers.NONE: _no_multipliers,
    Multipliers.GEMMA: _gemma_multipliers,
    Multipliers.COHERE: _cohere_multipliers,
    Multipliers.GRANITE: _granite_multipliers,
    Multipliers.MINICPM: _minicpm_multipliers,
}
