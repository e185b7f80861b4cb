"""Processes that make bitrates: devices that two sweeps share, signals, a flow that is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest
from conversions import small_options, weights
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect_runs import log_lines, run_state
from servers import wait_for
from tiny import make_tiny

from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows import sweep_locally

pytestmark = pytest.mark.slow

FLOW = """
import sys
from exl2flow.core.options.sweep import SweepConfig
from exl2flow.flows import sweep

if __name__ == "__main__":
    state = sweep(SweepConfig.model_validate_json(sys.argv[1]), return_state=True)
    print(state.state_details.flow_run_id, state.name, flush=True)
"""
Environment = Mapping[str, str]


@pytest.fixture
def env(prefect_env: Environment, single_thread: None, tmp_path: Path) -> Environment:
    """The environment of flows; devices are those of the test."""
    (tmp_path / "tmp").mkdir()
    return {**prefect_env, "TMPDIR": str(tmp_path / "tmp")}


def config_of(folder: Path, name: str, **values: object) -> SweepConfig:
    source = make_tiny("llama", folder / name, num_hidden_layers=6)
    options = {"runner": "processes", "bpw": (3, 4), **values}
    return SweepConfig.model_validate(
        {"source": source, "out": folder / f"{name}-out", **small_options(), **options}
    )


@contextmanager
def flow(config: SweepConfig, env: Environment) -> Iterator[subprocess.Popen[str]]:
    """Run a sweep in a process of its own."""
    script = config.source.parent / "flow.py"  # processes of a pool read the main module again
    script.write_text(FLOW)
    with subprocess.Popen(
        [sys.executable, str(script), config.model_dump_json()],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(config: SweepConfig, env: Environment) -> None:
    with flow(config, env) as process:
        out, err = process.communicate()
    assert out.split()[-1] == "Completed", err


def expected(config: SweepConfig, folder: Path) -> dict[str, bytes]:
    """Return the weights of the same sweep without Prefect or processes."""
    plain = config.model_copy(update={"out": folder / "plain", "work_root": folder / "plain-work"})
    return weights(sweep_locally(plain).out)


def quantizing(config: SweepConfig) -> list[int]:
    """Return the processes that have finished a sublayer of a bitrate and are at the next one."""
    found = []
    for path in config.work_dir_root.glob("*/quantize/*/manifest.json"):
        manifest = json.loads(path.read_bytes())
        if manifest["status"] == "partial" and manifest["cursor"] > 0:
            lock = path.parents[2] / "locks" / f"quantize-{path.parent.name}"
            found.append(int(lock.read_text()))
    return found


def has_ended(pids: list[int]) -> Callable[[], bool]:
    def check() -> bool:
        return not any(Path(f"/proc/{pid}/cwd").exists() for pid in pids)

    return check


def quantize_times(run: str) -> list[tuple[datetime, datetime]]:
    """Return when the run quantized each of its bitrates."""
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
    with get_client(sync_client=True) as client:
        tasks = client.read_task_runs(flow_run_filter=chosen)
    found = [t for t in tasks if t.name.endswith("quantize") and t.start_time and t.end_time]
    return [(t.start_time, t.end_time) for t in found if t.start_time and t.end_time]


def test_two_sweeps_at_the_same_time_use_a_device_in_turn(env: Environment, tmp_path: Path) -> None:
    configs = [config_of(tmp_path, name, workers=1) for name in ("one", "two")]

    with flow(configs[0], env) as first, flow(configs[1], env) as second:
        said = [process.communicate() for process in (first, second)]

    runs = [out.split()[0] for out, _ in said]
    assert [out.split()[1] for out, _ in said] == ["Completed"] * 2, said
    times = sorted(time for run in runs for time in quantize_times(run))
    assert len(times) == 4
    assert all(a[1] <= b[0] for a, b in pairwise(times))
    lines = [line.message for run in runs for line in log_lines(run)]
    assert sum("slot=0" in line for line in lines) == 4
    assert any("waiting for one of the devices 0" in line for line in lines)
    for config in configs:
        assert weights(config.out) == expected(config, tmp_path / config.source.name)


@pytest.mark.parametrize(
    ("send", "signum"),
    [(os.kill, signal.SIGTERM), (os.kill, signal.SIGINT), (os.killpg, signal.SIGINT)],
    ids=["SIGTERM", "SIGINT", "Ctrl-C"],
)
def test_a_signal_lets_all_processes_finish_a_sublayer_and_leaves_none(
    env: Environment, tmp_path: Path, send: Callable[[int, int], None], signum: int
) -> None:
    config = config_of(tmp_path, "tiny", workers=2, bpw=(3, 4, 5, 6))
    with flow(config, env) as process:
        wait_for(lambda: len(quantizing(config)) == 2)
        workers = quantizing(config)

        send(process.pid, signum)
        out, err = process.communicate()

    assert run_state(UUID(out.split()[0])) == "Cancelled", err
    assert has_ended(workers)()
    assert weights(config.out).keys() <= {"3.0bpw", "4.0bpw"}
    begun = config.work_dir_root.glob("*/quantize/*/manifest.json")
    stopped = [json.loads(path.read_bytes())["status"] for path in begun]
    assert stopped == ["partial"] * 2  # what had not begun did not begin
    finish(config, env)
    assert weights(config.out) == expected(config, tmp_path / "again")


def test_processes_end_with_a_flow_that_is_killed_and_the_next_run_goes_on(
    env: Environment, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "tiny", workers=2)
    with flow(config, env) as process:
        wait_for(lambda: len(quantizing(config)) == 2)
        workers = quantizing(config)

        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(has_ended(workers))

    finish(config, env)
    assert weights(config.out) == expected(config, tmp_path / "again")
