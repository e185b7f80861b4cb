"""The result of a run that makes one model, and its pipeline, the same with and without Prefect."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from exl2flow.core import words
from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.options.base import MEASUREMENT_FILE
from exl2flow.core.store.files import read_json
from exl2flow.core.store.stage import Config, Pipeline, Stage
from exl2flow.inference.report.comparison import Compared, compared, known_score
from exl2flow.inference.validate.stage import REPORT_FILE, check_verdict
from exl2flow.pipeline.devices import choose_allocator, resolve_device
from exl2flow.pipeline.hub.publish import Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Folders of the model and of its stages, its figures, warnings, and what was published.

    figures: size, bits per weight and score; report: what validation wrote, and its folder; None
    if the run does not validate.
    """

    out: Path
    stages: Mapping[str, Path]
    warnings: tuple[str, ...]
    figures: Compared | None = None
    report: Mapping[str, Any] | None = field(default=None, repr=False)
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


def open_pipeline(config: Config, stages: Sequence[Stage[Config]]) -> Pipeline:
    """Return the stages of a configuration, resolved for its device."""
    choose_allocator()
    return Pipeline(config, stages, device=resolve_device(config.device).type)


def result_of(pipeline: Pipeline) -> Conversion:
    """Return the result of a finished pipeline.

    Raises:
        ValidationFailed: the model is above a limit; it carries the result.
    """
    folders = {name: pipeline.path(name) for name in pipeline.stages}
    out = pipeline.config.out.resolve()
    if "validate" not in folders:
        return Conversion(out=out, stages=folders, warnings=())
    folder, score = folders["validate"], known_score(out)
    report = read_json(folder / REPORT_FILE)
    [figures] = compared([score]) if score else [None]
    result = Conversion(
        out=out,
        stages=folders,
        warnings=tuple(report["warnings"]),
        figures=figures,
        report={**report, "report_folder": str(folder)},
    )
    with carrying(result):
        check_verdict(folder)
    return result


@contextmanager
def carrying(result: object) -> Iterator[None]:
    """Let errors inside the block carry the result of a run that fails at its end."""
    try:
        yield
    except Exl2FlowError as error:
        error.result = result
        raise


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
