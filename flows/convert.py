"""The flow `convert`: from a Hugging Face folder to a validated EXL2 model."""

from prefect import flow

from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows.runs.endings import ending
from exl2flow.flows.runs.in_flow import run_in_flow
from exl2flow.pipeline.conversion import Conversion


@flow(flow_run_name="{config.run_name}", persist_result=False)
@ending
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
    conversion: Conversion = run_in_flow("convert", config, config.target)
    return conversion
