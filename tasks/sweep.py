"""A bitrate of a sweep as a Prefect task, whose stages are tasks of their own on the same page.

A task and not a flow: every runner takes tasks, and a reader finds all bitrates on one page.
"""

import logging
import os
from pathlib import Path

from prefect import task

from exl2flow.core.config import ConversionConfig
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
def make_bitrate(name: str, config: ConversionConfig, slots: Path | None = None) -> str:
    """Run the stages of one bitrate that others do not share, and return what it ran on.

    Args:
        name: of the bitrate.
        config: its conversion.
        slots: folder of the device slots, one of which this process takes for good; None where
            processes have no device of their own.

    Raises:
        Interrupted: a signal came; everything finished is committed.
        ValidationFailed: the model is above a limit.
    """
    slot = "" if slots is None else Slots(slots).take()
    with logged(), labelled(name):
        log.info("bitrate=%s slot=%s process=%d", name, slot or "none", os.getpid())
        pipeline = Pipeline(config, STAGES, device=resolve_device(config.device).type)
        run_stages(pipeline, label=name, done=SHARED)
        check_verdict(pipeline.path("validate"))
    return slot
