"""Runs the bitrates of a sweep on one of Prefect's task runners, chosen by one option.

Every process other than the flow's, in a pool or in a cluster, takes a free device of its host; see
`core.slots`.
"""

import logging
import multiprocessing
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State
from prefect.context import refresh_global_settings_context
from prefect.futures import PrefectFuture
from prefect.settings import get_current_settings
from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from exl2flow.core.errors import ConfigError, Interrupted
from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.device_locks import DeviceLocks
from exl2flow.core.runtime.interrupt import StopRequest
from exl2flow.core.runtime.progress import Tick, report
from exl2flow.core.store.apart import ApartShare, kind_of
from exl2flow.core.store.crew import Errand
from exl2flow.core.store.files import write_text
from exl2flow.core.store.stage import Pipeline
from exl2flow.pipeline.bitrates import SharedOut, check_runner, no_cluster, workers_of
from exl2flow.pipeline.devices import resolve_device
from exl2flow.tasks.share import REFUSED, make_share
from exl2flow.tasks.sweep import ProcessShare, make_bitrate

log = logging.getLogger(__name__)

ATTEMPTS = 3  # of a bitrate whose process died
POLL_SECONDS = 0.2  # between checks for a signal
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}

AnyRunner = TaskRunner[Any]  # of any kind of future


class ProcessDied(Exception):
    """The process that made a bitrate ended without reporting an error."""


def make_all(config: SweepConfig, stop: StopRequest) -> dict[str, BaseException]:
    """Make all bitrates, several at a time if configured; return the errors of failed ones.

    A bitrate whose process died is resumed in another attempt, in the last one by itself, because a
    pool loses all its processes when one dies.

    Raises:
        ConfigError: no cluster answers.
        Interrupted: a signal arrived, and the workers of this runner cannot be asked to stop.
    """
    outcomes: dict[str, BaseException | None] = {}
    remaining = config.models()
    for attempt in range(1, ATTEMPTS + 1):
        alone = [{name: conversion} for name, conversion in remaining.items()]
        for group in alone if attempt == ATTEMPTS else [remaining]:
            outcomes |= _attempt(config, group, stop)
        remaining = {n: c for n, c in remaining.items() if isinstance(outcomes[n], ProcessDied)}
    return {name: error for name, error in outcomes.items() if error is not None}


@contextmanager
def _settings_exported() -> Iterator[None]:
    """Let processes and threads that start inside the block find the server of this run.

    They do not inherit settings from a context; without these settings Prefect starts servers.
    Upstream: https://github.com/PrefectHQ/prefect/issues/12966
    """
    ours = QUIET | get_current_settings().to_environment_variables(exclude_unset=True)
    added = ours.keys() - os.environ.keys()
    os.environ.update({name: ours[name] for name in added})
    refresh_global_settings_context()
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        refresh_global_settings_context()


def _runner(config: SharedOut, workers: int) -> AnyRunner:
    """Return the runner; clusters that it starts listen on the loopback interface only."""
    match config.runner:
        case "threads":
            return ThreadPoolTaskRunner(max_workers=workers)
        case "processes":
            return ProcessPoolTaskRunner(max_workers=workers, initializer=_end_with_the_flow)
        case "dask":
            return _dask(config, workers)
        case "ray":
            return _ray(config, workers)
    raise AssertionError(config.runner)


def _dask(config: SharedOut, workers: int) -> AnyRunner:
    from prefect_dask import DaskTaskRunner

    options = {"n_workers": workers, "threads_per_worker": 1, "host": "127.0.0.1"}
    started = {"cluster_kwargs": {**options, "dashboard_address": "127.0.0.1:0"}}  # None: 8787
    used = {"address": config.cluster} if config.cluster else started
    runner: AnyRunner = DaskTaskRunner(**used)
    return runner


def _ray(config: SharedOut, workers: int) -> AnyRunner:
    """Return Ray's runner; no public argument says where a cluster listens (ray issue 1677)."""
    from prefect_ray import RayTaskRunner

    options = {"num_cpus": workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    runner: AnyRunner = RayTaskRunner(
        **({"address": config.cluster} if config.cluster else {"init_kwargs": options})
    )
    return runner


@contextmanager
def _running(runner: AnyRunner, config: SharedOut) -> Iterator[AnyRunner]:
    """Start a runner for the block.

    Raises:
        ConfigError: no cluster answers.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(runner)
            getattr(runner, "client", None)  # Dask connects now
        except OSError as error:
            raise no_cluster(str(config.runner), config.cluster, error) from None
        yield runner


def _demands(config: SharedOut) -> AbstractContextManager[None]:
    """Have Ray assign a GPU to every bitrate or share."""
    if config.runner != "ray" or resolve_device(config.device).type == "cpu":
        return nullcontext()
    from prefect_ray.context import remote_options

    options: AbstractContextManager[None] = remote_options(num_gpus=1)
    return options


def _end_with_the_flow() -> None:
    """End this process of a pool when the flow's is killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.setpgrp()  # Ctrl-C on a terminal reaches the flow only, which passes it on once

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _attempt(
    config: SweepConfig, conversions: Mapping[str, ConversionConfig], stop: StopRequest
) -> dict[str, BaseException | None]:
    """Make bitrates, and return why each of them failed, None if it did not."""
    if not conversions:
        return {}
    workers = (os.cpu_count() or 1) if config.cluster else workers_of(config)
    with _settings_exported(), tempfile.TemporaryDirectory(prefix="exl2flow-") as folder:
        share = ProcessShare(workers=config.workers or workers, stop=Path(folder) / "stop")
        messenger = Messenger(config, stop, share.stop)
        with _running(_runner(config, workers), config) as runner, _demands(config):
            elsewhere = config.runner != "threads"
            given = {"share": share if elsewhere else None}
            on_one = {"gpus": None} if elsewhere or workers > 1 else {}  # bitrates have one each
            futures = {
                name: runner.submit(
                    make_bitrate,
                    {"name": name, "config": conversion.model_copy(update=on_one), **given},
                )
                for name, conversion in conversions.items()
            }
            outcomes = {}
            for name, future in futures.items():
                outcomes[name] = _outcome(future, messenger)
                if elsewhere and outcomes[name] is None:  # its process reports no steps
                    report(Tick(stage=f"{name} validate", done=1, total=1))
            return outcomes


def share_out(config: MeasureConfig, pipeline: Pipeline) -> None:
    """Let workers of a cluster make shares of a measurement; what fails is left to this process.

    Raises:
        ConfigError: no cluster answers, or a worker lacks what all need.
        Interrupted: a signal arrived.
    """
    check_runner(config)
    pipeline.share_out("measure", partial(_made_elsewhere, config, pipeline.device))


def _made_elsewhere(
    config: MeasureConfig, device: str, errand: Errand, stop: StopRequest
) -> Iterator[tuple[str, Any]]:
    workers = config.workers or workers_of(config)
    probe = errand.path / f"probe-{os.getpid()}", secrets.token_hex()
    with (
        _settings_exported(),
        tempfile.TemporaryDirectory(prefix="exl2flow-") as folder,
        _probed(*probe),
        _running(_runner(config, workers), config) as runner,
        _demands(config),
    ):
        process = ProcessShare(workers=workers, stop=Path(folder) / "stop")
        messenger = Messenger(config, stop, process.stop)
        kind = kind_of(device)
        shares = [
            ApartShare(rank=rank, count=workers, kind=kind, probe=probe) for rank in range(workers)
        ]
        given = {"errand": errand, "process": process}
        futures = [runner.submit(make_share, {**given, "share": share}) for share in shares]
        for share, future in zip(shares, futures, strict=True):
            failure = _outcome(future, messenger)
            if isinstance(failure, Interrupted):
                raise failure
            if failure is None:
                yield from share.told()
                continue
            why = str(future.state.message)
            if why.startswith(REFUSED):
                raise ConfigError(why.removeprefix(REFUSED))
            log.warning("a share is made here: %s", failure)


@contextmanager
def _probed(path: Path, content: str) -> Iterator[None]:
    """Have a file during the block, and behind it neither that nor those named after it."""
    write_text(path, content)
    try:
        yield
    finally:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)


class Messenger:
    """Passes a signal on to whoever makes bitrates, once."""

    def __init__(self, config: SharedOut, stop: StopRequest, file: Path) -> None:
        self.stop = stop
        self._runner = config.runner
        self._file = file

    def pass_on(self) -> None:
        """Ask workers to stop; threads share the flow's request.

        Raises:
            Interrupted: the workers of a cluster do not listen; they end with it.
        """
        signum = self.stop.signum
        if signum is None or self._file.exists():
            return
        write_text(self._file, str(signum))
        if self._runner in ("dask", "ray"):
            raise Interrupted("stopped; everything finished is saved", signum=signum)
        if self._runner == "processes":
            owners = DeviceLocks.of_host("cuda").owners() | DeviceLocks.of_host("cpu").owners()
            for child in multiprocessing.active_children():
                if child.pid in owners:  # others see the file before they begin
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signum)


def _outcome(future: PrefectFuture[Any], messenger: Messenger) -> BaseException | None:
    """Wait for a bitrate, and return why it failed."""
    while True:
        try:
            future.wait(timeout=POLL_SECONDS)
        except Exception as error:  # whatever ended the process or the cluster
            failure: BaseException | None = _died(type(error).__name__)
            break
        if future.state.is_final():
            failure = _error(future.state)
            break
        if (failure := _lost(future)) is not None:
            break
        messenger.pass_on()
    signum = messenger.stop.signum
    if isinstance(failure, ProcessDied) and signum is not None:
        return Interrupted("stopped; everything finished is saved", signum=signum)
    return failure


def _lost(future: PrefectFuture[Any]) -> ProcessDied | None:
    """Return an error if a Dask cluster gave up a task; Prefect's future shows it as pending."""
    wrapped = getattr(future, "wrapped_future", None)
    if getattr(wrapped, "status", "pending") not in ("error", "cancelled", "lost"):
        return None
    return _died(repr(wrapped.exception(timeout=POLL_SECONDS)))  # type: ignore[union-attr]


def _error(state: State[Any]) -> BaseException | None:
    if state.is_completed():
        return None
    error = state.result(raise_on_failure=False)
    if state.is_crashed() and not isinstance(error, Interrupted):
        return _died(str(state.message))
    return error if isinstance(error, BaseException) else ProcessDied(str(state.message))


def _died(how: str) -> ProcessDied:
    return ProcessDied(f"the process that made it died ({how})")
