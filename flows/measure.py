"""The flow `measure`: the stages that do not depend on the target bitrate."""

from pathlib import Path

from prefect import flow

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.flows.runs.endings import ending
from exl2flow.flows.runs.in_flow import run_in_flow
from exl2flow.pipeline.conversion import Conversion


@flow(flow_run_name="{config.source.name}", persist_result=False)
@ending
def measure(config: MeasureConfig | ConversionConfig) -> Path:
    """Run the stages up to `measure`, and return the path of its `measurement.json`.

    A conversion's configuration also works: its first stages are those of its measurement.

    Raises:
        ConfigError: the conversion already has a measurement.
        HubError: the source cannot be fetched.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
    """
    if config.measurement_file is not None:
        raise ConfigError("`measurement` names a finished measurement; leave it empty to measure")
    measured: Conversion = run_in_flow("measure", config)
    return measured.measurement
