"""Sweeps on clusters that run already: whose devices, the same bytes, a dead worker, no cluster."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from conversions import small_options, weights
from prefect_runs import log_lines, run_state
from servers import free_port, wait_for
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.core.options.measure import MeasureConfig
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.core.runtime.device_locks import DeviceLocks
from exl2flow.core.store.files import read_json
from exl2flow.flows import measure, sweep, sweep_locally

Environment = Mapping[str, str]


@pytest.fixture
def env(
    prefect_env: Environment, single_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Environment:
    """The environment of a cluster, which knows nothing of our Prefect server."""
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    own = {
        "TMPDIR": str(tmp_path / "tmp"),
        "PREFECT_HOME": str(tmp_path / "home"),
        "DASK_TEMPORARY_DIRECTORY": str(tmp_path / "tmp"),
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",  # gives a killed worker's task up
    }
    return {n: v for n, v in prefect_env.items() if n != "PREFECT_API_URL"} | own


@pytest.fixture
def config(tmp_path: Path) -> SweepConfig:
    source = make_tiny("llama", tmp_path / "tiny", num_hidden_layers=6)
    return SweepConfig.model_validate(
        {"source": source, "out": tmp_path / "out", "bpw": (3, 4, 6), **small_options()}
    )


@contextmanager
def ended_after(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process and all that belong to its session after the block."""
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


@contextmanager
def dask_cluster(env: Environment) -> Iterator[str]:
    """Run a scheduler and two workers; yield the scheduler's address."""
    port, host = free_port(), ["--host", "127.0.0.1"]
    address = f"tcp://127.0.0.1:{port}"
    scheduler = ["scheduler", *host, "--port", str(port), "--no-dashboard"]
    workers = ["worker", address, *host, "--nworkers", "2", "--nthreads", "1", "--no-dashboard"]
    with ExitStack() as stack:
        for words in (scheduler, workers):
            command = [sys.executable, "-m", "dask", *words]
            process = subprocess.Popen(
                command,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.enter_context(ended_after(process))
        yield address


@contextmanager
def ray_cluster(env: Environment) -> Iterator[str]:
    """Run a node with two workers; yield its address."""
    port, host = free_port(), "127.0.0.1"
    options = [f"--node-ip-address={host}", f"--port={port}", "--num-cpus=2"]
    off = ["--include-dashboard=false", "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    with tempfile.TemporaryDirectory(prefix="ray-") as place:  # names of sockets must be short
        process = subprocess.Popen(
            [*command, *options, *off, f"--temp-dir={place}"],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with ended_after(process):
            wait_for(lambda: listens(port))
            yield f"{host}:{port}"


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def quantizers(work_root: Path) -> list[int]:
    """Return the processes that have finished a sublayer of a bitrate."""
    found = []
    for folder in work_root.glob("*/quantize/*"):
        if any(folder.glob("sublayers/*.safetensors")):
            lock = folder.parents[1] / "locks" / f"quantize-{folder.name}"
            found.append(int(lock.read_text()))
    return found


def check_killed_worker(config: SweepConfig, env: Environment, folder: Path) -> None:
    """Run a sweep one of whose workers is killed, and ask for all that it shall give."""
    slots = DeviceLocks(Path(env["TMPDIR"]) / f"exl2flow-slots-{os.getuid()}" / "cpu")
    owners: set[int] = set()

    def kill_one_of_two() -> None:
        wait_for(lambda: len(slots.owners()) == 2 and quantizers(config.work_dir_root))
        owners.update(slots.owners())
        os.kill(quantizers(config.work_dir_root)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one_of_two)
    killer.start()

    state = sweep(config, return_state=True)

    killer.join()
    run = state.state_details.flow_run_id
    assert state.is_completed(), state
    assert run is not None
    assert run_state(run) == "Completed"
    assert len(owners) == 2  # a slot each
    lines = "\n".join(log.message for log in log_lines(run))
    begun = re.findall(r"bitrate=(\S+) slot=[01] process=(\d+)", lines)
    assert {name for name, _ in begun} == {"3.0bpw", "4.0bpw", "6.0bpw"}
    assert str(os.getpid()) not in {process for _, process in begun}
    plain = config.model_copy(
        update={"out": folder / "plain", "work_root": folder / "work", "runner": "threads"}
    )
    assert weights(config.out) == weights(sweep_locally(plain).out)


@pytest.mark.slow
def test_dask_cluster_makes_the_same_bytes_though_a_worker_is_killed(
    env: Environment, config: SweepConfig, tmp_path: Path
) -> None:
    pytest.importorskip("prefect_dask", reason="comes with the extra `dask`")
    with dask_cluster(env) as address:
        options = {"runner": "dask", "cluster": address, "workers": 2}
        check_killed_worker(config.model_copy(update=options), env, tmp_path)


@pytest.mark.slow
def test_ray_cluster_makes_the_same_bytes_though_a_worker_is_killed(
    env: Environment, config: SweepConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prefect_ray", reason="comes with the extra `ray`")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token into the user's home
    with ray_cluster({**env, "RAY_AUTH_MODE": "disabled"}) as address:
        options = {"runner": "ray", "cluster": address, "workers": 2}
        check_killed_worker(config.model_copy(update=options), env, tmp_path)


@pytest.mark.slow
def test_cluster_that_does_not_answer_is_told(env: Environment, config: SweepConfig) -> None:
    pytest.importorskip("prefect_dask", reason="comes with the extra `dask`")
    import dask

    address = f"tcp://127.0.0.1:{free_port()}"
    options = {"runner": "dask", "cluster": address}

    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        state = sweep(config.model_copy(update=options), return_state=True)

    with pytest.raises(ConfigError, match=f"no dask cluster answers at `{address}`"):
        state.result()


def check_shared_measurement(options: Mapping[str, object], folder: Path) -> None:
    """Measure on the workers of a cluster; the file is that of one process."""
    source = make_tiny("llama", folder / "tiny", num_hidden_layers=3)
    calibration = small_options()["calibration"]
    given = {"source": source, "device": "cpu", "calibration": calibration}
    alone = MeasureConfig.model_validate({**given, "out": folder / "alone" / "measured.json"})
    shared = {**given, "out": folder / "shared.json", "work_root": folder / "work", **options}
    config = MeasureConfig.model_validate(shared)

    state = measure(config, return_state=True)

    assert state.is_completed(), state
    run = state.state_details.flow_run_id
    assert run is not None
    lines = [log.message for log in log_lines(run)]
    made = [line for line in lines if line.startswith("share=")]
    assert len(made) == 2, lines
    assert not any("is made here" in line for line in lines)
    found, expected = (read_json(path) for path in (state.result(), measure(alone)))
    assert found == expected
    assert [*config.work_dir_root.rglob("probe-*")] == []


@pytest.mark.slow
def test_dask_cluster_measures_what_one_process_does(env: Environment, tmp_path: Path) -> None:
    pytest.importorskip("prefect_dask", reason="comes with the extra `dask`")
    with dask_cluster(env) as address:
        check_shared_measurement({"runner": "dask", "cluster": address, "workers": 2}, tmp_path)


@pytest.mark.slow
def test_ray_cluster_measures_what_one_process_does(
    env: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prefect_ray", reason="comes with the extra `ray`")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with ray_cluster({**env, "RAY_AUTH_MODE": "disabled"}) as address:
        check_shared_measurement({"runner": "ray", "cluster": address, "workers": 2}, tmp_path)
