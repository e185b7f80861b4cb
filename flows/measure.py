"""The flow `measure`: the stages that do not depend on the target bitrate."""

from pathlib import Path

from prefect import flow

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.flows.runs.conversion import open_pipeline
from exl2flow.flows.runs.hooks import cancelled_if_interrupted
from exl2flow.flows.runs.preparation import prepare
from exl2flow.quant.measure.measurement import MEASUREMENT_FILE
from exl2flow.tasks.fetch import with_local_source
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import MEASURE_STAGES
from exl2flow.tasks.tags import tag_run


@flow(
    name="measure",
    flow_run_name="{config.source.name}",
    on_failure=[cancelled_if_interrupted],
    persist_result=False,
)
def measure(config: MeasureConfig | ConversionConfig) -> Path:
    """Run the stages up to `measure`, and return the path of its `measurement.json`.

    A conversion's configuration also works: its first stages are those of its measurement.

    Raises:
        ConfigError: the conversion already has a measurement.
        HubError: the source cannot be fetched.
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
    """
    if isinstance(config, MeasureConfig):
        config = config.conversion()
    if config.measurement is not None:
        raise ConfigError("`measurement` names a finished measurement; leave it empty to measure")
    with logged():
        tag_run(config.source)
        config = prepare(with_local_source(config), MEASURE_STAGES).config
        pipeline = open_pipeline(config, MEASURE_STAGES)
        run_stages(pipeline)
        return pipeline.path("measure") / MEASUREMENT_FILE
