"""The flows without Prefect: the same stages in the same order, in this process."""

from collections.abc import Sequence
from dataclasses import replace

from exl2flow.core.errors import Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.publication import PublishConfig
from exl2flow.core.options.refine import RefinementConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import listening
from exl2flow.core.runtime.progress import labelled
from exl2flow.core.store.cleaning import clean_after
from exl2flow.core.store.stage import Stage
from exl2flow.flows.runs.bitrates import (
    Sweep,
    conclude_sweep,
    raise_failures,
    record_published,
    release_of_sweep,
)
from exl2flow.flows.runs.conversion import Conversion, open_pipeline, result_of
from exl2flow.flows.runs.preparation import prepare, prepare_refinement, prepare_sweep
from exl2flow.flows.runs.release import check_release, hub_of, release_of
from exl2flow.tasks.publish import Published, publish
from exl2flow.tasks.stages import MEASURE_STAGES, REFINE_STAGES, STAGES, run_in_order


def run_locally(config: ConversionConfig, *, stages: Sequence[Stage] = STAGES) -> Conversion:
    """Run the stages in this process, and publish; ticks go to the current progress sink.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `convert`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    check_release(config)
    config = prepare(config, stages).config
    pipeline = open_pipeline(config, stages)
    run_in_order(pipeline)
    made = result_of(pipeline)
    clean_after(config)
    release = release_of(config, pipeline, [made.out]) if "validate" in made.stages else None
    return made if release is None else replace(made, published=_publish(release))


def _publish(release: PublishConfig) -> Published:
    return publish(release, hub_of(release.token_block))


def refine_locally(config: RefinementConfig) -> Conversion:
    """Refine a model in this process; ticks go to the current progress sink.

    Raises:
        ConfigError, SourceModelError, PreflightFailed: before any work, as the flow `refine`.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the refined model is above a limit.
    """
    pipeline = open_pipeline(prepare_refinement(config, REFINE_STAGES).config, REFINE_STAGES)
    run_in_order(pipeline)
    return result_of(pipeline)


def sweep_locally(config: SweepConfig) -> Sweep:
    """Make the bitrates of a sweep one after the other in this process, and publish them.

    Raises:
        HubError, PublicationRefused, PublicationDamaged: as the flow `sweep`.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates failed; the others are kept.
    """
    check_release(config)
    prepare_sweep(config)
    failures: dict[str, BaseException] = {}
    with listening():
        shared = open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES)
        run_in_order(shared)
        for name, conversion in config.conversions().items():
            try:
                with labelled(name):
                    pipeline = open_pipeline(conversion, STAGES)
                    run_in_order(pipeline, done=shared.stages)
                    result_of(pipeline)
            except Interrupted:
                raise
            except Exception as error:  # another bitrate may succeed; all are reported at the end
                failures[name] = error
    made = conclude_sweep(config, failures)
    raise_failures(config, failures)
    clean_after(config)
    release = release_of_sweep(config)
    return made if release is None else record_published(made, _publish(release))
