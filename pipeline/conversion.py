"""The result of a run that makes one model, and its pipeline, the same with and without Prefect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from exl2flow.core import words
from exl2flow.core.options.base import MEASUREMENT_FILE
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import ModelOptions
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.store.stage import Config, Pipeline, Stage
from exl2flow.inference.report.comparison import Compared, compared, known_score
from exl2flow.inference.validate.stage import check_verdict
from exl2flow.pipeline.devices import choose_allocator, resolve_device
from exl2flow.pipeline.hub.publish import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Folders of the model and of its stages, its figures, warnings, and what was published.

    figures: size, bits per weight and score; None if the run does not validate.
    """

    out: Path
    stages: Mapping[str, Path]
    warnings: tuple[str, ...]
    figures: Compared | None = None
    published: Published | None = None

    def __str__(self) -> str:
        """Return the result in a line for people; `repr` has everything."""
        if self.figures is None:
            return f"`{self.stages[list(self.stages)[-1]]}`"
        return in_a_line(str(self.out), self.figures)

    @property
    def measurement(self) -> Path:
        """The file of what was measured."""
        return self.stages["measure"] / MEASUREMENT_FILE

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


def result_of(pipeline: Pipeline) -> Conversion:
    """Return the result of a finished pipeline.

    Raises:
        ValidationFailed: the model is above a limit.
    """
    folders = {name: pipeline.path(name) for name in pipeline.stages}
    warnings = check_verdict(folders["validate"]) if "validate" in folders else []
    out = pipeline.config.out.resolve()
    score = known_score(out) if "validate" in folders else None
    [figures] = compared([score]) if score else [None]
    return Conversion(out=out, stages=folders, warnings=tuple(warnings), figures=figures)


def in_a_line(name: str, figures: Compared) -> str:
    """Return a model's size, bits per weight and divergence in words."""
    parts = [words.size(figures.bytes)]
    if figures.bpw is not None:
        parts.append(f"{words.bits(figures.bpw)} bits per weight")
    if figures.kl is not None:
        parts.append(f"KL divergence {words.divergence(figures.kl)} nats")
    if figures.score is not None:
        parts.append(f"perplexity {words.perplexity(figures.score.perplexity)}")
    return f"`{name}`: {', '.join(parts)}"
