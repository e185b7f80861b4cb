"""A bitrate of a sweep as a Prefect task, whose stages are tasks of their own on the same page.

A task and not a flow: every runner takes tasks, and a reader finds all bitrates on one page.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.interrupt import StopRequest, listening
from exl2flow.core.progress import labelled
from exl2flow.core.slots import Slots, see_only, visible_gpus
from exl2flow.core.stage import Pipeline
from exl2flow.inference.validate.stage import check_verdict
from exl2flow.kernels import resolve_device
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages
from exl2flow.tasks.stages import MEASURE_STAGES, STAGES

log = logging.getLogger(__name__)

SHARED = tuple(stage.name for stage in MEASURE_STAGES)
WAIT_SECONDS = 0.2  # between looks for a free device


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a process of its own comes to a device.

    workers: processes at a time on a host without GPUs; stop: a file that appears when everything
    shall stop, with the number of the signal.
    """

    workers: int
    stop: Path


@task(name="bitrate", task_run_name="{name}", persist_result=False)
def make_bitrate(
    name: str, config: ConversionConfig, share: Share | None = None
) -> State[BaseException | None]:
    """Run the stages of one bitrate that others do not share.

    Its errors are returned in a state: raised, they would have Prefect roll back the finished
    stages, or rather say so.

    Args:
        name: of the bitrate.
        config: its conversion.
        share: how this process comes to a device; None where it is that of the flow.

    Returns:
        Completed, or failed with the error: `Interrupted` if a signal came.
    """
    with logged(), labelled(name), listening() as stop:
        try:
            with _device(config, share, stop) as slot:
                log.info("bitrate=%s slot=%s process=%d", name, slot, os.getpid())
                pipeline = Pipeline(config, STAGES, device=resolve_device(config.device).type)
                run_stages(pipeline, label=name, done=SHARED)
                check_verdict(pipeline.path("validate"))
        except Exl2FlowError as error:
            return Failed(message=str(error), data=error)
        except Exception as error:  # a defect; other bitrates may get by without it
            log.exception("bitrate=%s", name)
            return Failed(message=f"{type(error).__name__}: {error}", data=error)
    return Completed()


@contextmanager
def _device(config: ConversionConfig, share: Share | None, stop: StopRequest) -> Iterator[str]:
    """Have a device of its own for the block, the only one that CUDA sees, and yield its name."""
    if share is None:
        yield "none"
        return
    gpus = visible_gpus(config.device)
    devices = gpus or [str(index) for index in range(share.workers)]
    is_told = False

    def pause() -> None:
        nonlocal is_told
        if not is_told:
            log.info("waiting for one of the devices %s, which others use", ", ".join(devices))
            is_told = True
        _raise_if_stopped(share, stop)
        time.sleep(WAIT_SECONDS)

    with Slots.of_host("cuda" if gpus else "cpu").hold(devices, pause) as device:
        _raise_if_stopped(share, stop)  # now that a signal will be sent to this process
        if gpus:
            see_only(device)
        try:
            yield device
        finally:
            if gpus:
                torch.cuda.empty_cache()  # others may have the device now


def _raise_if_stopped(share: Share, stop: StopRequest) -> None:
    signum = stop.signum
    if signum is None and share.stop.exists():
        text = share.stop.read_text()
        signum = int(text) if text.isdigit() else signal.SIGTERM  # that it is there says enough
    if signum is not None:
        raise Interrupted("stopped before it began; everything finished is saved", signum=signum)
