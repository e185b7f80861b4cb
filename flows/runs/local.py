"""The kinds of runs, one row each, and how any of them goes from its options to its result.

This process runs them without Prefect; `flows.runs.in_flow` runs the same rows inside a flow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import ConversionConfig, RunOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest, listening
from exl2flow.core.runtime.progress import labelled
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.flows.runs.bitrates import Sweep, conclude_sweep, raise_failures
from exl2flow.flows.runs.conversion import Conversion, conversions_of, open_pipeline, result_of
from exl2flow.flows.runs.preparation import Config, prepare
from exl2flow.flows.runs.release import check_release, hub_of, release_of
from exl2flow.tasks.publish import Published, publish
from exl2flow.tasks.stages import MEASURE_STAGES, REFINE_STAGES, STAGES, run_in_order


class Local:
    """The steps of a run in this process; ticks go to the current progress sink."""

    def check(self, config: RunOptions) -> None:
        """Check before any work whether the result could be published."""
        check_release(config)

    def with_folder(self, config: Config) -> Config:
        """Return the options with a folder as their source."""
        return config

    def run(self, pipeline: Pipeline) -> None:
        """Run the stages in order."""
        run_in_order(pipeline)

    def make_bitrates(self, config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
        """Make the bitrates of a sweep that has its measurement; return the errors of failed ones.

        Raises:
            Interrupted: a signal came.
        """
        failures: dict[str, BaseException] = {}
        for name, conversion in config.conversions().items():
            try:
                with labelled(name):
                    pipeline = open_pipeline(conversion, STAGES)
                    run_in_order(pipeline, done=[stage.name for stage in MEASURE_STAGES])
                    result_of(pipeline)
            except Interrupted:
                raise
            except Exception as error:  # another bitrate may succeed; all are reported at the end
                failures[name] = error
        return failures

    def show(self, config: RunOptions, made: Conversion | Sweep) -> None:
        """Show a result beside the run."""

    def publish(self, release: PublishConfig) -> Published:
        """Publish what was made."""
        return publish(release, hub_of(release.token_block))


def _make_model(config: RunOptions, stages: Sequence[Stage], steps: Local) -> Conversion:
    [conversion] = conversions_of(config).values()
    pipeline = open_pipeline(conversion, stages)
    steps.run(pipeline)
    return result_of(pipeline)


def _make_sweep(config: SweepConfig, stages: Sequence[Stage], steps: Local) -> Sweep:
    with listening() as stop:
        steps.run(open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES))
        failures = steps.make_bitrates(config, stop)
        made = conclude_sweep(config, failures)
        steps.show(config, made)
        raise_failures(config, failures)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kind of run: the stages it has, and what makes its result of them."""

    stages: tuple[Stage, ...]
    make: Callable[[Any, Sequence[Stage], Local], Any] = _make_model


RUNS = {
    "convert": Run(stages=STAGES),
    "measure": Run(stages=MEASURE_STAGES),
    "refine": Run(stages=REFINE_STAGES),
    "sweep": Run(stages=STAGES, make=_make_sweep),
}


def carry_out(run: Run, config: RunOptions, steps: Local) -> Any:
    """Check, make, clean and publish; a run that does not validate publishes nothing.

    Returns:
        a `Sweep` of a sweep, else a `Conversion`.
    """
    publishes = "validate" in [stage.name for stage in run.stages]
    if publishes:
        steps.check(config)
    config = prepare(steps.with_folder(config), run.stages).config
    made = run.make(config, run.stages, steps)
    clean_after(config)
    release = release_of(config) if publishes else None
    if release is not None:
        made = made.record(steps.publish(release))
        steps.show(config, made)
    return made


def run_locally(
    config: ConversionConfig | RefinementConfig, *, stages: Sequence[Stage] | None = None
) -> Conversion:
    """Run all stages of a conversion or a refinement, or these, in this process, and publish.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `convert`.
        ConfigError, SourceModelError, PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    run = RUNS["refine" if isinstance(config, RefinementConfig) else "convert"]
    made: Conversion = carry_out(Run(stages=tuple(stages or run.stages)), config, Local())
    return made


def sweep_locally(config: SweepConfig) -> Sweep:
    """Make the bitrates of a sweep one after the other in this process, and publish them.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `sweep`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates failed; the others are kept.
    """
    made: Sweep = carry_out(RUNS["sweep"], config, Local())
    return made
