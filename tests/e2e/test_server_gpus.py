"""A server with a worker per GPU: who runs what, on which device."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from conversions import small_config, small_options
from prefect_runs import run_state
from servers import LastingServer, wait_for
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.core.options.sweep import SweepConfig

WORKERS = {"worker-gpu4": "4", "worker-gpu6": "6"}  # no such devices: the runs are on the CPU


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LastingServer]:
    server = LastingServer(home=tmp_path / "home of a server", folder=tmp_path)
    try:
        server.up("--gpus", "4,6")
        with server.used():
            yield server
    finally:
        server.call("down")


def device(pid: int) -> str:
    """Return which GPUs a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)["CUDA_VISIBLE_DEVICES"]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def submit(server: LastingServer, name: str, config: ConversionConfig | SweepConfig) -> UUID:
    return server.submit(f"{name}/{name}", config.model_dump(mode="json"))


def pool_process(config: SweepConfig) -> int:
    """Return the process that quantizes a bitrate, once there is one."""
    found: list[int] = []

    def look() -> bool:
        locks = config.work_dir_root.glob("*/locks/quantize-*")
        found.extend(int(text) for lock in locks if (text := lock.read_text().strip()))
        return bool(found)

    wait_for(look)
    return found[0]


@pytest.mark.slow
def test_each_gpu_has_one_run_at_a_time_and_its_processes_use_that_gpu_only(
    server: LastingServer,
) -> None:
    source = make_tiny("llama", server.folder / "a", num_hidden_layers=12, hidden_size=128)
    sweep = SweepConfig.model_validate(
        {"source": source, "out": server.folder / "a-out", "bpw": (3, 4), "runner": "processes"}
        | small_options()
    )
    others = [
        small_config(
            make_tiny("llama", server.folder / name, num_hidden_layers=12, hidden_size=128),
            server.folder / f"{name}-out",
        )
        for name in "bc"
    ]

    runs = [submit(server, "sweep", sweep), *(submit(server, "convert", c) for c in others)]
    wait_for(lambda: sorted(map(run_state, runs)).count("Running") == 2)
    flows = {name: server.flow_processes(name) for name in WORKERS}
    child = pool_process(sweep)

    assert [len(pids) for pids in flows.values()] == [1, 1]
    for name, [pid] in flows.items():
        assert device(server.pid(name)) == device(pid) == WORKERS[name]
    assert device(child) == device(parent(child))
    assert [server.wait(run) for run in runs] == ["Completed"] * 3
    with server.client() as client:
        first, second, third = sorted(
            ((found.start_time, found.end_time) for found in map(client.read_flow_run, runs)),
            key=lambda times: str(times[0]),
        )
    assert second[0] < first[1]  # type: ignore[operator]  # both have run
    assert third[0] >= min(first[1], second[1])  # type: ignore[operator, type-var]
