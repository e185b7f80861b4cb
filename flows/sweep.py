"""The flow `sweep`: one model at several bitrates, from one measurement."""

from prefect import flow

from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows.runs.endings import ending
from exl2flow.flows.runs.in_flow import run_in_flow
from exl2flow.pipeline.bitrates import Sweep


@flow(flow_run_name="{config.run_name}", persist_result=False)
@ending
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
    targets = [conversion.target for conversion in config.models().values()]
    result: Sweep = run_in_flow("sweep", config, config.runner, *targets)
    return result
