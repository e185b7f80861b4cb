"""The flow `refine`: better codes and scales for an EXL2 model, at the same size."""

from prefect import flow

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.flows.runs.conversion import Conversion, open_pipeline, result_of
from exl2flow.flows.runs.hooks import cancelled_if_interrupted
from exl2flow.flows.runs.preparation import prepare_refinement
from exl2flow.tasks.fetch import with_local_source
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import REFINE_STAGES
from exl2flow.tasks.tags import tag_run


@flow(
    name="refine",
    flow_run_name="{config.run_name}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def refine(config: RefinementConfig) -> Conversion:
    """Refine a model, judge it on held-out rows, compile and validate; finished stages are cached.

    Raises:
        HubError: the reference cannot be fetched.
        ConfigError, SourceModelError: the model cannot be refined, or not by this reference.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the refined model is above a limit.
    """
    with logged():
        tag_run(config.source, config.target)
        config = prepare_refinement(with_local_source(config), REFINE_STAGES).config
        pipeline = open_pipeline(config, REFINE_STAGES)
        run_stages(pipeline)
        return result_of(pipeline)
