"""The flow `refine`: better codes and scales for an EXL2 model, at the same size."""

from prefect import flow

from exl2flow.core.options.refine import RefinementConfig
from exl2flow.flows.runs.endings import ending
from exl2flow.flows.runs.in_flow import run_in_flow
from exl2flow.pipeline.conversion import Conversion


@flow(flow_run_name="{config.run_name}", persist_result=False)
@ending
def refine(config: RefinementConfig) -> Conversion:
    """Refine a model, judge it on held-out rows, compile and validate; finished stages are cached.

    Raises:
        HubError: the reference cannot be fetched.
        ConfigError, SourceModelError: the model cannot be refined, or not by this reference.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the refined model is above a limit.
    """
    refinement: Conversion = run_in_flow("refine", config, config.target)
    return refinement
