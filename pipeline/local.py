"""The kinds of runs, one row each, and how any of them goes from its options to its result.

This process runs them without Prefect; `flows.runs.in_flow` runs the same rows inside a flow.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import ModelOptions, RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest, listening
from exl2flow.core.runtime.progress import Progress, labelled, reporting_to
from exl2flow.core.runtime.whole_run import Watcher, logging_progress
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.stage import Pipeline, Stage
from exl2flow.pipeline.bitrates import Sweep, conclude_sweep, raise_failures
from exl2flow.pipeline.conversion import Conversion, conversions_of, open_pipeline, result_of
from exl2flow.pipeline.hub.publish import Published, publish
from exl2flow.pipeline.preparation import Sources, prepare_source
from exl2flow.pipeline.release import check_release, hub_of, release_of, target_of
from exl2flow.pipeline.stages import MEASURE_STAGES, REFINE_STAGES, STAGES, run_in_order

PUBLISHING = ("upload", "verify")  # what publishing reports as stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of a run: here without Prefect, in a flow as tasks.

    check: refuses what could not be published or made, before any work; sources: the ways to
    the folder of a source; run: runs all stages; make_bitrates: returns
    the errors of failed ones; show: displays a sweep while it runs; publish: uploads results;
    watch: shows how far the run inside its block is.
    """

    check: Callable[[RunOptions], None]
    sources: Sources
    run: Callable[[Pipeline], object]
    make_bitrates: Callable[[SweepConfig, StopRequest], Mapping[str, BaseException]]
    show: Callable[[SweepConfig, Sweep], None]
    publish: Callable[[PublishConfig], Published]
    watch: Callable[[RunOptions], AbstractContextManager[Watcher]]


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
    sources=Sources(
        outlined=lambda source, work_root, token_block: nullcontext(),
        fetched=lambda source, work_root, token_block: source,
    ),
    run=run_in_order,
    make_bitrates=_make_in_turn,
    show=lambda config, sweep: None,
    publish=lambda release: publish(release, hub_of(release.token_block)),
    watch=lambda config: logging_progress(output_of(config)),
)


def output_of(config: RunOptions) -> str:
    """Return for people where the result of a run goes."""
    to = getattr(config, "publish", None)
    return f"`{config.out.resolve()}`" + (f" and `{to.repo}` on the Hub" if to else "")


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
    with steps.watch(config) as watcher:
        publishes = "validate" in [stage.name for stage in run.stages]
        if publishes:
            steps.check(config)
        config = prepare_source(config, run.stages, steps.sources).config
        watcher.expect(stages_in_order(run, config))
        result = run.make(config, run.stages, steps)
        clean_after(config)
        release = release_of(config) if publishes else None
        if release is not None:
            result = result.record(steps.publish(release))
            if isinstance(config, SweepConfig):
                steps.show(config, result)
        watcher.finish(result)
        return result


def is_finished(name: str, config: RunOptions) -> bool:
    """Return whether a run of `RUNS` has neither a stage to run nor anything to publish."""
    if target_of(config) is not None:
        return False
    stages = RUNS[name].stages
    pipelines = [open_pipeline(each, stages) for each in conversions_of(config).values()]
    return all(pipeline.is_complete(stage) for pipeline in pipelines for stage in pipeline.stages)


def stages_in_order(run: Run, config: RunOptions) -> list[str]:
    """Return the names of all stages of a checked run, as their ticks name them."""
    shared = MEASURE_STAGES if isinstance(config, SweepConfig) else ()
    names = list[str]()
    for label, each in conversions_of(config).items():
        own = [stage.name for stage in run.stages if stage.enabled(each) and stage not in shared]
        if shared:
            names = names or [stage.name for stage in shared if stage.enabled(each)]
            own = [f"{label} {name}" for name in own]
        names += own
    publishes = "validate" in [stage.name for stage in run.stages]
    return [*names, *(PUBLISHING if publishes and target_of(config) else ())]


def run_locally(
    config: ModelOptions,
    *,
    stages: Sequence[Stage[Any]] | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Run all stages of a conversion or a refinement, or these, in this process, and publish.

    How far it is appears in log lines of level INFO: `logging.basicConfig(level=logging.INFO)`
    shows them.

    Args:
        config: what to make.
        stages: those to run; None: all.
        progress: is called with a `Tick` for every step of a stage.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `convert`.
        ConfigError, SourceModelError, PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    run = RUNS["refine" if isinstance(config, RefinementConfig) else "convert"]
    with reporting_to(progress) if progress else nullcontext():
        conversion: Conversion = carry_out(Run(stages=tuple(stages or run.stages)), config, HERE)
    return conversion


def sweep_locally(config: SweepConfig, *, progress: Progress | None = None) -> Sweep:
    """Make the bitrates of a sweep one after the other in this process, and publish them.

    Args:
        config: what to make.
        progress: see `run_locally`.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `sweep`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates failed; the others are kept.
    """
    with reporting_to(progress) if progress else nullcontext():
        sweep: Sweep = carry_out(RUNS["sweep"], config, HERE)
    return sweep
