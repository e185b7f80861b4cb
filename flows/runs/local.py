"""The kinds of runs, one row each, and how any of them goes from its options to its result.

This process runs them without Prefect; `flows.runs.in_flow` runs the same rows inside a flow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import ModelOptions, RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest, listening
from exl2flow.core.runtime.progress import labelled
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.flows.runs.bitrates import Sweep, conclude_sweep, raise_failures
from exl2flow.flows.runs.conversion import Conversion, conversions_of, open_pipeline, result_of
from exl2flow.flows.runs.preparation import prepare, with_folder
from exl2flow.flows.runs.release import check_release, hub_of, release_of
from exl2flow.tasks.publish import Published, publish
from exl2flow.tasks.stages import MEASURE_STAGES, REFINE_STAGES, STAGES, run_in_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a run: here without Prefect, in a flow as tasks.

    check: refuses what could not be published or made, before any work; fetched: returns the folder
    of a source, given its work root and token block; run: runs all stages; make_bitrates: returns
    the errors of those that failed; show: shows a sweep beside the run; publish: uploads results.
    """

    check: Callable[[RunOptions], None]
    fetched: Callable[[Path, Path, str | None], Path]
    run: Callable[[Pipeline], object]
    make_bitrates: Callable[[SweepConfig, StopRequest], Mapping[str, BaseException]]
    show: Callable[[SweepConfig, Sweep], None]
    publish: Callable[[PublishConfig], Published]


def _make_in_turn(config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
    """Make bitrates whose measurement is finished, one after the other.

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


HERE = Steps(
    check=check_release,
    fetched=lambda source, work_root, token_block: source,
    run=run_in_order,
    make_bitrates=_make_in_turn,
    show=lambda config, sweep: None,
    publish=lambda release: publish(release, hub_of(release.token_block)),
)


def _make_model(config: RunOptions, stages: Sequence[Stage[Any]], steps: Steps) -> Conversion:
    [conversion] = conversions_of(config).values()
    pipeline = open_pipeline(conversion, stages)
    steps.run(pipeline)
    return result_of(pipeline)


def _make_sweep(config: SweepConfig, stages: Sequence[Stage[Any]], steps: Steps) -> Sweep:
    with listening() as stop:
        steps.run(open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES))
        failures = steps.make_bitrates(config, stop)
        sweep = conclude_sweep(config, failures)
        steps.show(config, sweep)
        raise_failures(config, failures)
        return sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kind of run: the stages it has, and what makes its result of them."""

    stages: tuple[Stage[Any], ...]
    make: Callable[[Any, Sequence[Stage[Any]], Steps], Any] = _make_model


RUNS = {
    "convert": Run(stages=STAGES),
    "measure": Run(stages=MEASURE_STAGES),
    "refine": Run(stages=REFINE_STAGES),
    "sweep": Run(stages=STAGES, make=_make_sweep),
}


def carry_out(run: Run, config: RunOptions, steps: Steps) -> Any:
    """Check, make, clean and publish; a run that does not validate publishes nothing.

    Returns:
        a `Sweep` of a sweep, else a `Conversion`.
    """
    publishes = "validate" in [stage.name for stage in run.stages]
    if publishes:
        steps.check(config)
    config = prepare(with_folder(config, steps.fetched), run.stages).config
    result = run.make(config, run.stages, steps)
    clean_after(config)
    release = release_of(config) if publishes else None
    if release is None:
        return result
    result = result.record(steps.publish(release))
    if isinstance(config, SweepConfig):
        steps.show(config, result)
    return result


def run_locally(config: ModelOptions, *, stages: Sequence[Stage[Any]] | None = None) -> Conversion:
    """Run all stages of a conversion or a refinement, or these, in this process, and publish.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `convert`.
        ConfigError, SourceModelError, PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    run = RUNS["refine" if isinstance(config, RefinementConfig) else "convert"]
    conversion: Conversion = carry_out(Run(stages=tuple(stages or run.stages)), config, HERE)
    return conversion


def sweep_locally(config: SweepConfig) -> Sweep:
    """Make the bitrates of a sweep one after the other in this process, and publish them.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `sweep`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates failed; the others are kept.
    """
    sweep: Sweep = carry_out(RUNS["sweep"], config, HERE)
    return sweep
