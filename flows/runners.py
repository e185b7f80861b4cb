"""Who makes the bitrates of a sweep: one of Prefect's task runners, by one option.

Processes on this host have a device each: those of a pool, and those of a Dask cluster that is
started here. Ray gives its workers devices itself, and so may a cluster that runs already.
"""

import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from prefect.client.schemas.objects import State
from prefect.context import refresh_global_settings_context
from prefect.futures import PrefectFuture
from prefect.settings import get_current_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from exl2flow.core.config import ConversionConfig
from exl2flow.core.errors import ConfigError, Interrupted
from exl2flow.core.interrupt import StopRequest
from exl2flow.core.slots import Slots
from exl2flow.core.sweep import SweepConfig
from exl2flow.kernels import resolve_device
from exl2flow.tasks.sweep import make_bitrate

ATTEMPTS = 3  # of a bitrate whose process died
POLL_SECONDS = 0.2  # between looks for a signal

AnyRunner = TaskRunner[Any]  # of any kind of future


class ProcessDied(Exception):
    """The process that made a bitrate ended without a word."""


def make_all(config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
    """Make all bitrates, several at a time if asked, and return those that failed, with why.

    A bitrate whose process died is made again, from where it had come to.

    Raises:
        ConfigError: the runner is not installed.
        Interrupted: a signal came, and the runner's workers cannot be asked to stop.
    """
    outcomes: dict[str, BaseException | None] = {}
    remaining = config.conversions()
    for _ in range(ATTEMPTS):
        outcomes |= _attempt(config, remaining, stop)
        remaining = {n: c for n, c in remaining.items() if isinstance(outcomes[n], ProcessDied)}
    return {name: error for name, error in outcomes.items() if error is not None}


@contextmanager
def _settings_exported() -> Iterator[None]:
    """Let processes and threads that start inside the block find the server of this run.

    They do not inherit settings that hold in a context only; without them Prefect starts servers.
    """
    ours = get_current_settings().to_environment_variables(exclude_unset=True)
    added = ours.keys() - os.environ.keys()
    os.environ.update({name: ours[name] for name in added})
    refresh_global_settings_context()
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        refresh_global_settings_context()


@contextmanager
def _device_slots(config: SweepConfig) -> Iterator[Slots | None]:
    """Offer this host's devices to processes that have none of their own."""
    if config.runner in ("threads", "ray") or config.cluster:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="exl2flow-slots-") as folder:
        slots = Slots(Path(folder))
        slots.offer(_devices(config))
        yield slots


def _devices(config: SweepConfig) -> list[str]:
    """Return the GPUs of this host that the sweep may use; on a CPU, a number per worker."""
    if resolve_device(config.device).type == "cpu":
        return [str(index) for index in range(config.workers or 1)]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
    if config.workers and config.workers > len(names):
        raise ConfigError(
            f"{config.workers} workers are more than the {len(names)} GPUs; each has one of its own"
        )
    return names[: config.workers]


def _runner(config: SweepConfig, workers: int) -> AnyRunner:
    """Return the runner; clusters that it starts listen to the loopback interface only.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        match config.runner:
            case "threads":
                return ThreadPoolTaskRunner(max_workers=workers)
            case "processes":
                return ProcessPoolTaskRunner(max_workers=workers)
            case "dask":
                return _dask(config, workers)
            case "ray":
                return _ray(config, workers)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the runner `{config.runner}` is not installed ({error}); it comes with "
            f"`pip install 'exl2flow[{config.runner}]'`"
        ) from error


def _dask(config: SweepConfig, workers: int) -> AnyRunner:
    from prefect_dask import DaskTaskRunner

    own = {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1"}
    started = {"cluster_kwargs": {**own, "dashboard_address": None}}
    runner: AnyRunner = DaskTaskRunner(
        **({"address": config.cluster} if config.cluster else started)
    )
    return runner


def _ray(config: SweepConfig, workers: int) -> AnyRunner:
    from prefect_ray import RayTaskRunner

    own = {"num_cpus": workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    runner: AnyRunner = RayTaskRunner(
        **({"address": config.cluster} if config.cluster else {"init_kwargs": own})
    )
    return runner


def _demands(config: SweepConfig) -> AbstractContextManager[None]:
    """Have Ray give every bitrate a GPU of its own."""
    if config.runner != "ray" or resolve_device(config.device).type == "cpu":
        return nullcontext()
    from prefect_ray.context import remote_options

    options: AbstractContextManager[None] = remote_options(num_gpus=1)
    return options


def _attempt(
    config: SweepConfig, conversions: Mapping[str, ConversionConfig], stop: StopRequest
) -> dict[str, BaseException | None]:
    """Make bitrates, and return why each of them failed, None if it did not."""
    if not conversions:
        return {}
    with _settings_exported(), _device_slots(config) as slots:
        workers = config.workers or (len(list(slots.folder.iterdir())) if slots else 1)
        with _runner(config, workers) as runner, _demands(config):
            folder = slots and slots.folder
            futures = {
                name: runner.submit(
                    make_bitrate, {"name": name, "config": conversion, "slots": folder}
                )
                for name, conversion in conversions.items()
            }
            return {name: _outcome(future, config, slots, stop) for name, future in futures.items()}


def _outcome(
    future: PrefectFuture[Any], config: SweepConfig, slots: Slots | None, stop: StopRequest
) -> BaseException | None:
    """Wait for a bitrate, and return why it failed."""
    is_told = False
    while True:
        try:
            future.wait(timeout=POLL_SECONDS)
        except Exception as error:  # whatever ended the process or the cluster
            return ProcessDied(f"the process that made it died ({type(error).__name__})")
        state = future.state
        if state.is_final():
            return _error(state)
        if stop.signum is not None and not is_told:
            _pass_on(stop.signum, config, slots)
            is_told = True


def _error(state: State[Any]) -> BaseException | None:
    if state.is_completed():
        return None
    error = state.result(raise_on_failure=False)
    if state.is_crashed() and not isinstance(error, Interrupted):
        return ProcessDied(f"the process that made it died ({state.message})")
    return error if isinstance(error, BaseException) else ProcessDied(str(state.message))


def _pass_on(signum: int, config: SweepConfig, slots: Slots | None) -> None:
    """Ask workers to stop; threads know, and Ctrl-C on a terminal has reached processes, too.

    Raises:
        Interrupted: the workers do not listen; they are ended with their cluster.
    """
    if config.runner in ("dask", "ray"):
        raise Interrupted("stopped; everything finished is saved", signum=signum)
    if slots is not None and signum == signal.SIGTERM:
        for process in slots.owners():
            with suppress(ProcessLookupError):
                os.kill(process, signum)
