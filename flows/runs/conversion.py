"""The result of a run that makes one model, and its pipeline, the same with and without Prefect."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import ModelOptions
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store.stage import Config, Pipeline, Stage
from exl2flow.inference.validate.stage import check_verdict
from exl2flow.kernels import resolve_device
from exl2flow.tasks.publish import Published

# The first avoids fragmentation of GPU memory; the others pin gigabytes without taking seconds
ALLOCATOR = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Folders of the model and of its stages, warnings of validation, and what was published."""

    out: Path
    stages: Mapping[str, Path]
    warnings: tuple[str, ...]
    published: Published | None = None

    def record(self, published: Published) -> Self:
        """Return this with where it was published."""
        return replace(self, published=published)


def conversions_of(config: RunOptions) -> Mapping[str, ModelOptions]:
    """Return name → options of each model that a run makes, in rising order of bits."""
    if isinstance(config, SweepConfig):
        return config.conversions()
    model = config.conversion() if isinstance(config, MeasureConfig) else config
    assert isinstance(model, ModelOptions)
    return {"model": model}


def open_pipeline(config: Config, stages: Sequence[Stage[Config]]) -> Pipeline:
    """Return the stages of a configuration, resolved for its device."""
    choose_allocator()
    return Pipeline(config, stages, device=resolve_device(config.device).type)


def choose_allocator() -> None:
    """Configure torch's GPU allocator unless the user has. Call before CUDA is initialized."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)


def result_of(pipeline: Pipeline) -> Conversion:
    """Return the result of a finished pipeline.

    Raises:
        ValidationFailed: the model is above a limit.
    """
    folders = {name: pipeline.path(name) for name in pipeline.stages}
    warnings = check_verdict(folders["validate"]) if "validate" in folders else []
    out = pipeline.config.out.resolve()
    return Conversion(out=out, stages=folders, warnings=tuple(warnings))
