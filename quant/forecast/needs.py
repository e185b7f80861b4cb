"""The needs of all stages of a run: which there are, and their sum on disk."""

from collections.abc import Collection, Sequence
from typing import Any

from exl2flow.core.options.config import RunOptions
from exl2flow.core.store.need import Need
from exl2flow.core.store.stage import Stage
from exl2flow.model import ModelSpec
from exl2flow.quant.sensitivity.stage import factor_sizes
from exl2flow.quant.walk.needs import Card, ModelSizes


def work_bytes(needs: Collection[Need]) -> int:
    """Return the most disk that checkpoints take: all that stays, and one stage's passing files."""
    kept = sum(need.kept_bytes for need in needs)
    return kept + max((need.passing_bytes for need in needs), default=0)


def stage_needs(
    config: RunOptions,
    stages: Sequence[Stage[Any]],
    spec: ModelSpec,
    card: Card | None,
    *,
    packed: int,
) -> dict[str, Need]:
    """Return the needs of the stages that take much, by name, in order.

    Args:
        config: the run.
        stages: of the making of the model; what is not enabled needs nothing.
        spec: its model.
        card: the GPU; None: there is none.
        packed: bytes of all quantized matrices.
    """
    factors = max(factor_sizes(spec, config.sensitivity), default=0)
    sizes = ModelSizes(spec, card, packed=packed, factors=factors)
    needs = {s.name: s.needs(config, sizes) for s in stages if s.enabled(config)}
    return {name: need for name, need in needs.items() if need is not None}
