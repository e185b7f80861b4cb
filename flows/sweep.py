"""The flow `sweep`: one model at several bitrates, from one measurement."""

from prefect import flow

from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.interrupt import listening
from exl2flow.core.store.cleaning import clean_after
from exl2flow.flows.runs.bitrates import (
    Sweep,
    check_runner,
    conclude_sweep,
    raise_failures,
    record_published,
    release_of_sweep,
)
from exl2flow.flows.runs.conversion import open_pipeline
from exl2flow.flows.runs.hooks import cancelled_if_interrupted
from exl2flow.flows.runs.preparation import prepare_sweep
from exl2flow.flows.runs.release import target_of
from exl2flow.flows.runs.runners import make_all
from exl2flow.tasks.compare import publish_comparison
from exl2flow.tasks.fetch import with_local_source
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publishing import branch_links, check_publication, publish_models
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import MEASURE_STAGES
from exl2flow.tasks.tags import tag_run


@flow(
    name="sweep",
    flow_run_name="{config.run_name}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def sweep(config: SweepConfig) -> Sweep:
    """Measure once, make every bitrate, compare and publish them; finished stages are cached.

    Raises:
        ConfigError: before any work, the runner is not installed or has too many workers.
        HubError: the source cannot be fetched, or the Hub rejects the models.
        PublicationRefused: before any work; or afterwards, because of the models' quality.
        PublicationDamaged: the download differs from the upload; the repository stays private.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        SweepFailed: some bitrates failed; the others are kept, and nothing is published.
    """
    with logged():
        tag_run(config.source, config.runner, *(c.target for c in config.conversions().values()))
        check_runner(config)
        if (target := target_of(config)) is not None:
            check_publication(target, config.source, config.work_dir_root, config.token_block)
        config = with_local_source(config)
        made = _make(config)
        release = release_of_sweep(config)
        if release is None:
            return made
        published = publish_models(release)
        links = branch_links(published)
        publish_comparison(config.source, config.run_name, made.scores, made.samples, links=links)
        return record_published(made, published)


def _make(config: SweepConfig) -> Sweep:
    with listening() as stop:
        prepare_sweep(config)
        run_stages(open_pipeline(config.conversion(config.bpw[0]), MEASURE_STAGES))
        failures = make_all(config, stop)
        made = conclude_sweep(config, failures)
        publish_comparison(config.source, config.run_name, made.scores, made.samples)
        raise_failures(config, failures)
        clean_after(config)
        return made
