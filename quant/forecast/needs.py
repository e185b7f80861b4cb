"""The needs of all stages of a run: which there are, and their sum on disk."""

from collections.abc import Collection

from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.refine import ModelOptions, RefinementConfig
from exl2flow.model import Composition, ModelSpec
from exl2flow.quant.allocate import stage as allocate
from exl2flow.quant.compile import stage as compiling
from exl2flow.quant.measure import stage as measure
from exl2flow.quant.quantize import stage as quantize
from exl2flow.quant.sensitivity import stage as sensitivity
from exl2flow.quant.tokenize import stage as tokenize
from exl2flow.quant.tune import stage as tune
from exl2flow.quant.walk.needs import FLOAT, HALF, Card, ModelSizes, Need


def work_bytes(needs: Collection[Need]) -> int:
    """Return the most disk that checkpoints take: all that stays, and one stage's passing files."""
    kept = sum(need.kept_bytes for need in needs)
    return kept + max((need.passing_bytes for need in needs), default=0)


def stage_needs(
    config: ModelOptions, spec: ModelSpec, card: Card | None, *, packed: int
) -> dict[str, Need]:
    """Return the needs of the stages that take much, by name, in order.

    Args:
        config: the run.
        spec: its model.
        card: the GPU; None: there is none.
        packed: bytes of all quantized matrices.
    """
    factors = max(sensitivity.factor_sizes(spec, config.sensitivity), default=0)
    sizes = ModelSizes(spec, card, packed=packed, factors=factors)
    needs = {"compose": _compose(config, sizes)} if config.calibration.text == "self" else {}
    needs["tokenize"] = tokenize.needs(config)
    if sensitivity.SENSITIVITY.enabled(config):
        needs["sensitivity"] = sensitivity.needs(config, sizes)
    if isinstance(config, RefinementConfig):
        needs["refine"] = quantize.needs(config, sizes, corrects=False)
    else:
        if measure.MEASURE.enabled(config):
            needs["measure"] = measure.needs(config, sizes)
        if config.allocate.rounds:
            needs["allocate"] = allocate.needs(config, sizes)
        needs["quantize"] = quantize.needs(config, sizes)
        if tune.TUNE.enabled(config):
            needs["tune"] = tune.needs(config, sizes)
    return needs | {"compile": compiling.needs(sizes)}


def _compose(config: RunOptions, sizes: ModelSizes) -> Need:
    """Return the need of `compose`: the whole model, fp16 on a GPU and fp32 on a CPU."""
    elements = Composition.of(sizes.spec, config.calibration).elements
    if sizes.card:
        return Need(gpu_memory_bytes=HALF * elements)
    return Need(memory_bytes=FLOAT * elements)
