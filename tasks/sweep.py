"""One bitrate of a sweep as a Prefect task; its stages are separate tasks on the same page.

A task, not a flow: every runner accepts tasks, and readers find all bitrates on one page.
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
WAIT_SECONDS = 0.2  # between checks for a free device


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How a separate process obtains a device.

    workers: processes at a time on a host without GPUs; stop: a file that appears when everything
    must stop, and contains the signal's number.
    """

    workers: int
    stop: Path


@task(name="bitrate", task_run_name="{name}", persist_result=False)
def make_bitrate(
    name: str, config: ConversionConfig, share: Share | None = None
) -> State[BaseException | None]:
    """Run the stages that one bitrate does not share with others.

    Errors are returned in a state: if raised, they would make Prefect roll back the finished
    stages, or at least log that it does.

    Args:
        name: the bitrate's name.
        config: its conversion.
        share: how this process obtains a device; None in the flow's own process.

    Returns:
        Completed, or failed with the error: `Interrupted` if a signal arrived.
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
        except Exception as error:  # a defect; other bitrates may not hit it
            log.exception("bitrate=%s", name)
            return Failed(message=f"{type(error).__name__}: {error}", data=error)
    return Completed()


@contextmanager
def _device(config: ConversionConfig, share: Share | None, stop: StopRequest) -> Iterator[str]:
    """Reserve a device for the block, the only one CUDA sees, and yield its name."""
    if share is None:
        yield "none"
        return
    gpus = visible_gpus(config.device)
    devices = gpus or [str(index) for index in range(share.workers)]
    is_told = False

    def pause() -> None:
        nonlocal is_told
        if not is_told:
            log.info("waiting for one of the devices %s, which are in use", ", ".join(devices))
            is_told = True
        _raise_if_stopped(share, stop)
        time.sleep(WAIT_SECONDS)

    with Slots.of_host("cuda" if gpus else "cpu").hold(devices, pause) as device:
        _raise_if_stopped(share, stop)  # from here on, this process receives signals itself
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
        signum = int(text) if text.isdigit() else signal.SIGTERM  # the file's existence is enough
    if signum is not None:
        raise Interrupted("stopped before it started; everything finished is saved", signum=signum)
