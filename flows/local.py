"""The stages of the flows, in the same order, without Prefect."""

from collections.abc import Sequence

from exl2flow.core.config import ConversionConfig
from exl2flow.core.progress import Tick, report
from exl2flow.core.stage import Stage
from exl2flow.flows.conversion import Conversion, conclude, open_pipeline
from exl2flow.quant.preflight import preflight
from exl2flow.tasks.stages import STAGES


def run_locally(config: ConversionConfig, *, stages: Sequence[Stage] = STAGES) -> Conversion:
    """Run the stages in this process; ticks go to the current progress sink.

    Raises:
        PreflightFailed: before any work.
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    preflight(config)
    pipeline = open_pipeline(config, stages)
    for name in pipeline.stages:
        if pipeline.is_complete(name):
            report(Tick(stage=name, done=1, total=1, detail="cached"))
        pipeline.run(name, progress=report)
    return conclude(pipeline)
