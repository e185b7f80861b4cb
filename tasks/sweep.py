"""A bitrate of a sweep as a Prefect task, whose stages are tasks of their own on the same page.

A task and not a flow: every runner takes tasks, and a reader finds all bitrates on one page.
"""

import logging
import os
from pathlib import Path

from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import Exl2FlowError
from exl2flow.core.progress import labelled
from exl2flow.core.slots import Slots
from exl2flow.core.stage import Pipeline
from exl2flow.inference.validate import check_verdict
from exl2flow.kernels import resolve_device
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import MEASURE_STAGES, STAGES

log = logging.getLogger(__name__)

SHARED = tuple(stage.name for stage in MEASURE_STAGES)


@task(name="bitrate", task_run_name="{name}", persist_result=False)
def make_bitrate(
    name: str, config: ConversionConfig, slots: Path | None = None
) -> State[BaseException | None]:
    """Run the stages of one bitrate that others do not share.

    Its errors are returned in a state: raised, they would have Prefect roll back the finished
    stages, or rather say so.

    Args:
        name: of the bitrate.
        config: its conversion.
        slots: folder of the device slots, one of which this process takes for good; None where
            processes have no device of their own.

    Returns:
        Completed, or failed with the error: `Interrupted` if a signal came.
    """
    with logged(), labelled(name):
        try:
            slot = "" if slots is None else Slots(slots).take()
            log.info("bitrate=%s slot=%s process=%d", name, slot or "none", os.getpid())
            pipeline = Pipeline(config, STAGES, device=resolve_device(config.device).type)
            run_stages(pipeline, label=name, done=SHARED)
            check_verdict(pipeline.path("validate"))
        except Exl2FlowError as error:
            return Failed(message=str(error), data=error)
        except Exception as error:  # a defect; other bitrates may get by without it
            log.exception("bitrate=%s", name)
            return Failed(message=f"{type(error).__name__}: {error}", data=error)
    return Completed()
