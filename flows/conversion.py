"""What a conversion hands back, and the pipeline it ran on: the same with and without Prefect."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exl2flow.core.config import RunOptions
from exl2flow.core.stage import Pipeline, Stage
from exl2flow.inference.validate.stage import check_verdict
from exl2flow.kernels import resolve_device
from exl2flow.tasks.publish import Published

# A GPU's memory splinters without the first; pinning gigabytes takes seconds without the others
ALLOCATOR = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Where model and stages' folders lie, what validation warned of, what was published."""

    out: Path
    stages: Mapping[str, Path]
    warnings: tuple[str, ...]
    published: Published | None = None


def open_pipeline(config: RunOptions, stages: Sequence[Stage]) -> Pipeline:
    """Resolve the stages of a configuration on the device it names."""
    choose_allocator()
    return Pipeline(config, stages, device=resolve_device(config.device).type)


def choose_allocator() -> None:
    """Say how a GPU's memory is reserved, before it is first used, unless the user said it."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)


def conclude(pipeline: Pipeline) -> Conversion:
    """Return what a finished pipeline made.

    Raises:
        ValidationFailed: the model is above a limit.
    """
    folders = {name: pipeline.path(name) for name in pipeline.stages}
    warnings = check_verdict(folders["validate"]) if "validate" in folders else []
    out = pipeline.config.out.expanduser().resolve()
    return Conversion(out=out, stages=folders, warnings=tuple(warnings))
