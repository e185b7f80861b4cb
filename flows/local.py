"""The stages of the flows, in the same order, without Prefect."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from exl2flow.core.cleaning import clean_after
from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import Interrupted
from exl2flow.core.interrupt import listening
from exl2flow.core.progress import Tick, labelled, report
from exl2flow.core.publication import PublishConfig
from exl2flow.core.stage import Pipeline, Stage
from exl2flow.core.sweep import SweepConfig
from exl2flow.flows.bitrates import (
    Sweep,
    conclude_sweep,
    noted,
    preflight_sweep,
    raise_failures,
    release_of_sweep,
)
from exl2flow.flows.conversion import Conversion, conclude, open_pipeline
from exl2flow.flows.release import check_release, hub_of, release_of
from exl2flow.quant.forecast.fit import fitted
from exl2flow.quant.forecast.preflight import preflight
from exl2flow.tasks.publish import Published, publish
from exl2flow.tasks.stages import MEASURE_STAGES, STAGES


def run_locally(config: ConversionConfig, *, stages: Sequence[Stage] = STAGES) -> Conversion:
    """Run the stages in this process, and publish; ticks go to the current progress sink.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `convert`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    check_release(config)
    config = fitted(config)
    preflight(config, stages)
    pipeline = open_pipeline(config, stages)
    _run(pipeline)
    made = conclude(pipeline)
    clean_after(config)
    release = release_of(config, pipeline, [made.out]) if "validate" in made.stages else None
    return made if release is None else replace(made, published=_publish(release))


def _publish(release: PublishConfig) -> Published:
    return publish(release, hub_of(release.token_block))


def _run(pipeline: Pipeline, *, done: Collection[str] = ()) -> None:
    """Run the stages in order, but those that are done."""
    for name in pipeline.stages:
        if name in done:
            continue
        if pipeline.is_complete(name):
            report(Tick(stage=name, done=1, total=1, detail="cached"))
        pipeline.run(name, progress=report)


def sweep_locally(config: SweepConfig) -> Sweep:
    """Make the bitrates of a sweep one after the other in this process, and publish them.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `sweep`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates could not be made; the others are.
    """
    check_release(config)
    preflight_sweep(config)
    failures: dict[str, BaseException] = {}
    with listening():
        shared = open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES)
        _run(shared)
        for name, conversion in config.conversions().items():
            try:
                with labelled(name):
                    pipeline = open_pipeline(conversion, STAGES)
                    _run(pipeline, done=shared.stages)
                    conclude(pipeline)
            except Interrupted:
                raise
            except Exception as error:  # another bitrate may succeed; all are told in the end
                failures[name] = error
    made = conclude_sweep(config, failures)
    raise_failures(config, failures)
    clean_after(config)
    release = release_of_sweep(config)
    return made if release is None else noted(made, _publish(release))
