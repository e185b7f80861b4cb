"""The flow `convert`: from a Hugging Face folder to a validated EXL2 model."""

from dataclasses import replace

from prefect import flow

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.store.cleaning import clean_after
from exl2flow.flows.runs.conversion import Conversion, open_pipeline, result_of
from exl2flow.flows.runs.hooks import cancelled_if_interrupted
from exl2flow.flows.runs.preparation import prepare
from exl2flow.flows.runs.release import release_of, target_of
from exl2flow.tasks.fetch import with_local_source
from exl2flow.tasks.logs import logged
from exl2flow.tasks.publishing import check_publication, publish_models
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import STAGES
from exl2flow.tasks.tags import tag_run


@flow(
    name="convert",
    flow_run_name="{config.run_name}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def convert(config: ConversionConfig) -> Conversion:
    """Run all enabled stages in order, then publish; finished stages are cached.

    Raises:
        HubError: the source cannot be fetched, or the Hub rejects the model.
        PublicationRefused: before any work; or afterwards, because of the model's quality.
        PublicationDamaged: the download differs from the upload; the repository stays private.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    with logged():
        tag_run(config.source, config.target)
        if (target := target_of(config)) is not None:
            check_publication(target, config.source, config.work_dir_root, config.token_block)
        config = prepare(with_local_source(config), STAGES).config
        pipeline = open_pipeline(config, STAGES)
        run_stages(pipeline)
        made = result_of(pipeline)
        clean_after(config)
        release = release_of(config, pipeline, [made.out])
        return made if release is None else replace(made, published=publish_models(release))
