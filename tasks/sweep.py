"""A bitrate of a sweep as a Prefect task; its stages are tasks on the same page.

It is a task, not a flow, because every runner takes tasks and all bitrates appear on one page.
"""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed, Failed

from exl2flow.core.device_name import index_of
from exl2flow.core.errors import Exl2FlowError, Interrupted
from exl2flow.core.options.config import ConversionConfig, RunOptions
from exl2flow.core.runtime.device_locks import DeviceLocks, see_only, visible_gpus
from exl2flow.core.runtime.interrupt import StopRequest, listening
from exl2flow.core.runtime.progress import labelled
from exl2flow.inference.validate.stage import check_verdict
from exl2flow.pipeline.conversion import open_pipeline
from exl2flow.pipeline.stages import SHARED_STAGES, STAGES
from exl2flow.tasks.logs import logged
from exl2flow.tasks.stage import run_stages

log = logging.getLogger(__name__)

SHARED = tuple(stage.name for stage in SHARED_STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """The way a separate process takes a device.

    workers: number of processes on a host without GPUs; stop: file that appears when everything is
    to stop and holds the signal's number.
    """

    workers: int
    stop: Path


@task(name="bitrate", task_run_name="{name}", persist_result=False)
def make_bitrate(
    name: str, config: ConversionConfig, share: ProcessShare | None = None
) -> State[BaseException | None]:
    """Run the stages of one bitrate that other bitrates do not share.

    Errors are returned in a state: if they were raised, Prefect would report the finished stages
    as rolled back.

    Args:
        name: name of the bitrate.
        config: its conversion.
        share: how this process takes a device; None in the process of the flow.

    Returns:
        Completed, failed with the error, or cancelled with `Interrupted` if a signal arrived.
    """
    with logged(), labelled(name), listening() as stop:
        state = _made(name, config, share, stop)
    if share is not None and stop.signum is not None and not share.stop.exists():
        # Meant for this process alone: a broken pool awaits its end
        signal.raise_signal(stop.signum)
    return state


def _made(
    name: str, config: ConversionConfig, share: ProcessShare | None, stop: StopRequest
) -> State[BaseException | None]:
    try:
        with own_device(config, share, stop) as slot:
            if share is not None and index_of(config.device) is not None:
                config = config.model_copy(update={"device": "cuda"})  # the only one it sees now
            log.info("bitrate=%s slot=%s process=%d", name, slot, os.getpid())
            pipeline = open_pipeline(config, STAGES)
            run_stages(pipeline, label=name, done=SHARED)
            check_verdict(pipeline.path("validate"))
    except Interrupted as stop:
        return Cancelled(message=str(stop), data=stop)
    except Exl2FlowError as error:
        return Failed(message=str(error), data=error)
    except Exception as error:  # a defect, which other bitrates may not hit
        log.exception("bitrate=%s", name)
        return Failed(message=f"{type(error).__name__}: {error}", data=error)
    return Completed()


@contextmanager
def own_device(config: RunOptions, share: ProcessShare | None, stop: StopRequest) -> Iterator[str]:
    """Reserve a device for the block, make it the only one that CUDA sees, and yield its name."""
    if share is None:
        yield "none"
        return
    gpus = visible_gpus(config.device)
    devices = gpus or [str(index) for index in range(share.workers)]
    check = partial(_raise_if_stopped, share, stop)
    with DeviceLocks.of_host("cuda" if gpus else "cpu").hold(devices, check) as device:
        check()  # from here on signals reach this process
        if gpus:
            see_only(device)
        try:
            yield device
        finally:
            if gpus:
                torch.cuda.empty_cache()  # for the next process on the device


def _raise_if_stopped(share: ProcessShare, stop: StopRequest) -> None:
    signum = stop.signum
    if signum is None and share.stop.exists():
        text = share.stop.read_text()
        signum = int(text) if text.isdigit() else signal.SIGTERM  # the file's existence is enough
    if signum is not None:
        raise Interrupted("stopped before it started; everything finished is saved", signum=signum)
