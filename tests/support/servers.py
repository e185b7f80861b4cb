"""A lasting server in its own folder, and helpers for tests that use it."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from conversions import small_config
from leftovers import end_with_this_process
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect_runs import run_state
from tiny import make_tiny

from exl2flow.core.options.config import ConversionConfig
from exl2flow.flows.server.deployments import core
from exl2flow.flows.server.services import Home

PROGRAM = (sys.executable, "-m", "exl2flow.flows.cli")
FINAL = {"Completed", "Failed", "Cancelled"}  # a crashed run goes on
PATIENCE_SECONDS = 300.0
DATABASE = "prefect.db"
API_PAUSE_SECONDS = 0.5
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Prefect's services poll every 5 to 60 s; tests would only wait.
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "0.5",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
}


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], object], *, pause: float = 0.1) -> None:
    """Return when the condition holds; pause: seconds between checks, longer if they are costly."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


@dataclass(frozen=True, slots=True)
class MigratedDatabase:
    """A copy of the first server's SQLite file; creating it is the slowest part of a start."""

    path: Path

    def give(self, prefect_home: Path) -> None:
        """Copy the database, if there is one, to a server that has not started yet."""
        if self.path.exists():
            prefect_home.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.path, prefect_home / DATABASE)

    def keep(self, prefect_home: Path) -> None:
        """Copy the database of a running server, if there is none yet."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(f".{os.getpid()}")
            with (
                closing(sqlite3.connect(prefect_home / DATABASE)) as source,
                closing(sqlite3.connect(draft)) as copy,
            ):
                source.backup(copy)
            draft.replace(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingServer:
    """folder: where relative paths of runs start; env: more environment of server and workers."""

    home: Path
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def call(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `exl2flow server …` for this home, to its end, without the user's Hub token.

        What it starts ends with this process.
        """
        end_with_this_process()
        own = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        return subprocess.run(
            [*PROGRAM, "server", *words, "--home", str(self.home)],
            cwd=self.folder,
            env={**own, **ENVIRONMENT, **self.env, **env},
            capture_output=True,
            text=True,
        )

    def up(self, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Start the server with one worker."""
        options = ("--port", str(self.port), "--gpus", "none", *options)
        done = self.call("up", *options, **env)
        assert done.returncode == 0, done.stderr
        return done

    def is_healthy(self) -> bool:
        """Return whether `status` finds nothing missing."""
        return self.call("status").returncode == 0

    @property
    def auth(self) -> str:
        """User and password, as clients name them."""
        return str(json.loads((self.home / "server.json").read_bytes())["auth"])

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make Prefect in this process use the server."""
        settings = {PREFECT_API_URL: self.api_url, PREFECT_API_AUTH_STRING: self.auth}
        with temporary_settings(settings):
            yield

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(api=self.api_url, auth_string=self.auth)

    def pid(self, service: str) -> int:
        """Return the process id of a service, 0 while it does not run."""
        found = Home(self.home).processes().get(service)
        return found.pid if found else 0

    def flow_processes(self, service: str) -> list[int]:
        """Return the process ids of the flows that a worker runs."""
        tasks = Path(f"/proc/{self.pid(service)}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def kill(self, service: str) -> None:
        """Kill a service and the processes that it started, as a power cut would."""
        for pid in (self.pid(service), *self.flow_processes(service)):
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the processes that mention this home."""
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

    def submit(self, deployment: str, config: dict[str, Any], key: str | None = None) -> UUID:
        """Create a run of a deployment, unless there is one of this key."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(
                found.id, parameters={"config": config}, idempotency_key=key
            ).id

    @contextmanager
    def schedule(
        self, deployment: str, schedule: IntervalSchedule, config: dict[str, Any]
    ) -> Iterator[None]:
        """Switch on the only schedule of a deployment, with other times and parameters."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            [before] = found.schedules
            given = {"schedule": schedule, "parameters": {"config": config} if config else {}}
            client.update_deployment_schedule(found.id, before.id, active=True, **given)
            try:
                yield
            finally:
                [now] = client.read_deployment_by_name(deployment).schedules
                given = {"schedule": before.schedule, "parameters": before.parameters}
                client.update_deployment_schedule(found.id, now.id, active=False, **given)

    @contextmanager
    def trigger(self, *, enabled: bool = True, **options: Any) -> Iterator[None]:
        """Change what the event of a new revision starts: whether, and with which options."""
        with self.client() as client:
            before = _trigger(client)
            changed = before.model_copy(update={"enabled": enabled}, deep=True)
            [action] = changed.actions
            assert isinstance(action, RunDeployment)
            assert action.parameters is not None
            action.parameters["config"] |= options
            client.update_automation(before.id, core(changed))
            try:
                yield
            finally:
                client.update_automation(_trigger(client).id, core(before))

    def wait(self, run: UUID) -> str:
        """Return the name of the run's final state."""
        wait_for(lambda: run_state(run) in FINAL, pause=API_PAUSE_SECONDS)
        return run_state(run)


def _trigger(client: SyncPrefectClient) -> Automation:
    [found] = [a for a in client.read_automations() if "revision" in a.name]
    return found


def long_conversion(folder: Path) -> ConversionConfig:
    """Return a conversion of 16 sublayers, each of which takes some tenths of a second."""
    source = make_tiny(
        "llama", folder / "tiny", num_hidden_layers=8, hidden_size=128, intermediate_size=256
    )
    return small_config(source, folder / "out", bpw=4.0)


def manifest_of(config: ConversionConfig, stage: str) -> dict[str, Any]:
    """Return the manifest of the only folder of a stage; empty before it begins."""
    for path in config.work_dir_root.glob(f"*/{stage}/*/manifest.json"):
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        return manifest
    return {}


def wait_for_cursor(config: ConversionConfig, stage: str, cursor: int) -> None:
    """Return when a stage has reached the cursor."""
    wait_for(lambda: manifest_of(config, stage).get("cursor", 0) >= cursor)
