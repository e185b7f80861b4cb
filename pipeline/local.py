"""The kinds of runs, one row each, and how any of them goes from its options to its result.

This process runs them without Prefect; `flows.runs.in_flow` runs the same rows inside a flow.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import RunOptions
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.refine import ModelOptions
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import StopRequest, listening
from exl2flow.core.runtime.progress import Progress, labelled, reporting_to
from exl2flow.core.runtime.whole_run import Watcher, logging_progress
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.stage import Stage
from exl2flow.pipeline.bitrates import Sweep, check_runner, conclude_sweep, raise_failures
from exl2flow.pipeline.conversion import Conversion, carrying, open_pipeline, result_of
from exl2flow.pipeline.hub.publish import publish
from exl2flow.pipeline.preparation import prepare_source
from exl2flow.pipeline.release import check_release, hub_of, release_of
from exl2flow.pipeline.run import Prepared, Run, Sources, Steps
from exl2flow.pipeline.stages import (
    ALL_STAGES,
    MEASURE_STAGES,
    REFINE_STAGES,
    SHARED_STAGES,
    STAGES,
    run_in_order,
)
from exl2flow.quant.refine.stored_model import check_refinement

log = logging.getLogger(__name__)

PUBLISHING = ("upload", "verify")  # what publishing reports as stages


def _make_in_turn(config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
    """Make bitrates whose measurement is finished, one after the other.

    Raises:
        Interrupted: a signal came.
    """
    failures: dict[str, BaseException] = {}
    for name, conversion in config.models().items():
        try:
            with labelled(name):
                pipeline = open_pipeline(conversion, STAGES)
                run_in_order(pipeline, done=[stage.name for stage in SHARED_STAGES])
                result_of(pipeline)
        except Interrupted:
            raise
        except Exception as error:  # another bitrate may succeed; all are reported at the end
            failures[name] = error
    return failures


HERE = Steps(
    check=lambda run, config: check_release(config),
    sources=Sources(
        outlined=lambda source, work_root, token_block: nullcontext(),
        fetched=lambda source, work_root, token_block: source,
    ),
    run=run_in_order,
    make_bitrates=_make_in_turn,
    share_out=lambda config, pipeline: log.warning(
        "`--runner %s` is for a run with Prefect; this process measures alone", config.runner
    ),
    show=lambda config, sweep: None,
    publish=lambda release: publish(release, hub_of(release.token_block)),
    watch=lambda config: logging_progress(output_of(config)),
)


def output_of(config: RunOptions) -> str:
    """Return for people where the result of a run goes."""
    to = config.publication
    return f"`{config.out.resolve()}`" + (f" and `{to.repo}` on the Hub" if to else "")


def _make_model(run: Run, prepared: Prepared[Any], steps: Steps) -> Conversion:
    [model] = prepared.models.values()
    pipeline = open_pipeline(model, run.stages)
    steps.run(pipeline)
    return result_of(pipeline)


def _make_measurement(run: Run, prepared: Prepared[Any], steps: Steps) -> Conversion:
    config, [model] = prepared.config, prepared.models.values()
    if isinstance(config, MeasureConfig) and config.runner is not None:
        steps.run(open_pipeline(model, run.stages[:-1]))  # which measuring reads
        steps.share_out(config, open_pipeline(model, run.stages))
    return _make_model(run, prepared, steps)


def _make_sweep(run: Run, prepared: Prepared[SweepConfig], steps: Steps) -> Sweep:
    config, first = prepared.config, next(iter(prepared.models.values()))
    with listening() as stop:
        steps.run(open_pipeline(first, run.shared))
        failures = steps.make_bitrates(config, stop)
        sweep = conclude_sweep(config, failures)
        steps.show(config, sweep)
        with carrying(sweep):
            raise_failures(config, failures)
        return sweep


RUNS = {
    "convert": Run(stages=STAGES, whole=STAGES, make=_make_model),
    "measure": Run(stages=MEASURE_STAGES, whole=STAGES, make=_make_measurement, check=check_runner),
    "refine": Run(
        stages=REFINE_STAGES, whole=REFINE_STAGES, make=_make_model, check_source=check_refinement
    ),
    "sweep": Run(
        stages=STAGES,
        whole=STAGES,
        make=_make_sweep,
        shared=SHARED_STAGES,
        check=check_runner,
        show=lambda steps, config, sweep: steps.show(config, sweep),
    ),
}


def check_and_carry_out(run: Run, config: RunOptions, steps: Steps) -> Any:
    """Check a run, then carry it out; see `prepare_source` and `carry_out`."""
    with steps.watch(config) as watcher:
        if run.publishes:
            steps.check(run, config)
        return _carried_out(run, prepare_source(run, config, steps.sources), steps, watcher)


def carry_out(run: Run, prepared: Prepared[Any], steps: Steps) -> Any:
    """Make, clean and publish; a run that does not validate publishes nothing.

    Returns:
        a `Sweep` of a sweep, else a `Conversion`. Errors at the end of a run carry it.
    """
    with steps.watch(prepared.config) as watcher:
        return _carried_out(run, prepared, steps, watcher)


def _carried_out(run: Run, prepared: Prepared[Any], steps: Steps, watcher: Watcher) -> Any:
    watcher.expect(stages_in_order(run, prepared))
    result = run.make(run, prepared, steps)
    clean_after(prepared.config, ALL_STAGES)
    release = release_of(prepared, result) if run.publishes else None
    if release is not None:
        with carrying(result):
            result = result.record(steps.publish(release))
        run.show(steps, prepared.config, result)
    watcher.finish(result)
    return result


def is_finished(run: Run, prepared: Prepared[Any]) -> bool:
    """Return whether a run has neither a stage to run nor anything to publish."""
    if prepared.config.publication is not None:
        return False
    pipelines = [open_pipeline(model, run.stages) for model in prepared.models.values()]
    return all(pipeline.is_complete(stage) for pipeline in pipelines for stage in pipeline.stages)


def stages_in_order(run: Run, prepared: Prepared[Any]) -> list[str]:
    """Return the names of all stages of a checked run, as their ticks name them."""
    first, *_ = prepared.models.values()
    names = [stage.name for stage in run.shared if stage.enabled(first)]
    for label, model in prepared.models.items():
        own = [s.name for s in run.stages if s not in run.shared and s.enabled(model)]
        names += [f"{label} {name}" for name in own] if run.shared else own
    publishes = run.publishes and prepared.config.publication is not None
    return [*names, *(PUBLISHING if publishes else ())]


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
    run = RUNS[config.kind]
    if stages:
        run = replace(run, stages=tuple(stages))
    with reporting_to(progress) if progress else nullcontext():
        conversion: Conversion = check_and_carry_out(run, config, HERE)
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
        sweep: Sweep = check_and_carry_out(RUNS["sweep"], config, HERE)
    return sweep
