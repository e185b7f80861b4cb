"""A lasting server in a folder of its own, with what tests do to it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from conversions import small_config
from prefect.client.orchestration import SyncPrefectClient
from prefect_runs import run_state
from tiny import make_tiny

from exl2flow.core.config import ConversionConfig

PROGRAM = (sys.executable, "-m", "exl2flow.flows.cli")
FINAL = {"Completed", "Failed", "Cancelled"}  # a crashed run goes on
PATIENCE_SECONDS = 240.0


def free_port() -> int:
    """Return a port of the loopback interface that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingServer:
    """folder: where relative paths of runs start."""

    home: Path
    folder: Path
    port: int = field(default_factory=free_port)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def call(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `exl2flow server …` for this home, to its end."""
        return subprocess.run(
            [*PROGRAM, "server", *words, "--home", str(self.home)],
            cwd=self.folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                **env,
            },
            capture_output=True,
            text=True,
        )

    def up(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Bring the server up with one worker."""
        options = ("--port", str(self.port), "--gpus", "none", *options)
        done = self.call("up", *options, **env)
        assert done.returncode == 0, done.stderr
        return done

    def status(self) -> dict[str, Any]:
        """Return what `status --json` prints."""
        found: dict[str, Any] = json.loads(self.call("status", "--json").stdout)
        return found

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(api=self.api_url)

    def pid(self, service: str) -> int:
        """Return the process id of a service."""
        content = json.loads((self.home / "services.json").read_bytes())
        return int(content[service]["pid"])

    def flow_processes(self, service: str) -> list[int]:
        """Return the process ids of the flows that a worker runs."""
        tasks = Path(f"/proc/{self.pid(service)}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def kill(self, service: str) -> None:
        """Kill a service and the processes that it started, as a power cut would."""
        for pid in (self.pid(service), *self.flow_processes(service)):
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the processes that have to do with this home."""
        own = str(self.home).encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if own in text:
                found.append(int(folder.name))
        return found

    def submit(self, deployment: str, config: dict[str, Any]) -> UUID:
        """Create a run of a deployment."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(
                found.id, parameters={"config": config}
            ).id

    def wait(self, run: UUID) -> str:
        """Return the name of the run's final state."""
        wait_for(lambda: run_state(run) in FINAL)
        return run_state(run)


def long_conversion(folder: Path) -> ConversionConfig:
    """Return a conversion of many sublayers, each of which takes some tenths of a second."""
    source = make_tiny(
        "llama", folder / "tiny", num_hidden_layers=12, hidden_size=128, intermediate_size=256
    )
    return small_config(source, folder / "out", bpw=4.0)


def manifest_of(config: ConversionConfig, stage: str) -> dict[str, Any]:
    """Return the manifest of the only folder of a stage; empty before it begins."""
    for path in config.work_dir_root.glob(f"*/{stage}/*/manifest.json"):
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        return manifest
    return {}


def wait_for_cursor(config: ConversionConfig, stage: str, cursor: int) -> None:
    """Return when a stage has come that far."""
    wait_for(lambda: manifest_of(config, stage).get("cursor", 0) >= cursor)
