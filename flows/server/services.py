"""The processes of a lasting server: how they are started, found and ended.

Everything lies in one folder, the home:

    server.json  options and password of `exl2flow server up`; only its owner can read it
    busy         locked by `up` and `down` while they work
    logs/        one file per process
    prefect/     Prefect's own home: database, results, leases

A process belongs to a home if its environment says so; runs inherit that from their worker. This
module is also the program of the supervisor; it does not load Prefect. If the supervisor is killed,
its services go on until the next `up` replaces them.
"""

import fcntl
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import psutil
from pydantic import Field, ValidationError, field_validator

from exl2flow.core.errors import ServerFailed
from exl2flow.core.options.base import Options

DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
DATABASE_PATTERN = r"^(postgresql\+asyncpg|sqlite\+aiosqlite)://"
HOME = Path("~/.exl2flow")
POOL = "exl2flow"
SERVER, SUPERVISOR = "server", "supervisor"
HEARTBEAT_SECONDS = 30  # the shortest interval that Prefect allows
LOG_LINES = 15
LARGEST_LOG = 20 * 2**20  # bytes; a larger one is set aside when its process starts
STOP_SECONDS = 30.0
LOOK_SECONDS = 1.0
TELL_SECONDS = 5.0  # between two messages of a command that waits
PAUSE_SECONDS = 10.0  # at least, between two starts of a service
HOME_VARIABLE, NAME_VARIABLE = "EXL2FLOW_SERVICE_OF", "EXL2FLOW_SERVICE"
PROGRAM_VARIABLE = "EXL2FLOW_SERVICE_PROGRAM"
PACKAGE = Path(__file__).parents[2]
PARTS = ("core", "kernels", "model", "quant", "engine", "inference", "pipeline", "tasks", "flows")
MODULES = "exl2flow.flows.server."
# Where to reach a server that listens on all interfaces; on `::`, it has no IPv4 address
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
QUIET_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",  # V1 opens: in V2's graphs, artifacts cannot be read
}
SERVER_ENVIRONMENT = {
    **QUIET_ENVIRONMENT,
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": f"{MODULES}ordering",
    # Leases in memory would stay held for ever if the server was killed.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage"
    ".filesystem",
}


TOGETHER = "+"  # between the GPUs of one worker


class ServerSettings(Options):
    """Options of a lasting server, and its password."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=4200, ge=1, le=65535)
    database: str | None = Field(default=None, pattern=DATABASE_PATTERN)  # None: SQLite in the home
    gpus: tuple[str, ...] = ()  # a worker each, `0+1` for both; empty: one worker without a GPU
    folder: Path  # where relative paths of deployments start
    auth: str = Field(default_factory=lambda: f"exl2flow:{secrets.token_urlsafe(24)}", repr=False)

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        """Accept an IPv6 address as it stands in URLs."""
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

    @property
    def url(self) -> str:
        """Address for programs and browsers on this machine."""
        return f"http://{in_url(LOOPBACK.get(self.host, self.host))}:{self.port}"

    @property
    def api_url(self) -> str:
        """Value of PREFECT_API_URL."""
        return f"{self.url}/api"

    @property
    def workers(self) -> dict[str, str | None]:
        """Service name → CUDA_VISIBLE_DEVICES of each worker."""
        named = {gpus: gpus.split(TOGETHER) for gpus in self.gpus}
        return {f"worker-gpu{'-'.join(g)}": ",".join(g) for g in named.values()} or {"worker": None}


class Home:
    """The folder of a lasting server, and its processes."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.file = self.path / "server.json"
        self.logs = self.path / "logs"

    def command(self, verb: str) -> str:
        """Return the command line for this home."""
        own = () if self.path == HOME.expanduser() else ("--home", str(self.path))
        return shlex.join(("exl2flow", "server", verb, *own))

    def settings(self) -> ServerSettings:
        """Return what the server was last started with.

        Raises:
            ServerFailed: it never was, or the file cannot be used.
        """
        try:
            return ServerSettings.model_validate_json(self.file.read_bytes())
        except FileNotFoundError:
            raise ServerFailed(
                f"no server was started in `{self.path}`; `{self.command('up')}` starts one"
            ) from None
        except (OSError, ValidationError) as error:
            raise ServerFailed(
                f"`{self.file}` is damaged or not yours; delete it, or use another `--home`"
            ) from error

    def save_settings(self, settings: ServerSettings) -> None:
        """Save the settings, which hold the password and perhaps that of the database."""
        draft = self.path / ".server.json"
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600, exist_ok=False)
        with draft.open("w") as file:
            file.write(settings.model_dump_json(indent=4))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.file)

    def processes(self) -> dict[str, psutil.Process]:
        """Return service name → process; runs are named after their process."""
        by_name = {}
        for process in psutil.process_iter(["environ", "cmdline"]):
            environment = process.info["environ"] or {}  # a zombie has none
            if environment.get(HOME_VARIABLE) == str(self.path):
                is_service = any(MODULES in word for word in process.info["cmdline"] or ())
                name = environment.get(NAME_VARIABLE) if is_service else None
                by_name[name or f"process {process.pid}"] = process
        return by_name

    def listed(self) -> list[tuple[str, int]]:
        """Return what each process is and its id, in a fixed order, without processes of runs."""
        by_name = self.processes()
        runs = {process.pid for name, process in by_name.items() if name.startswith("process")}
        services = {name: p.pid for name, p in by_name.items() if p.pid not in runs}
        order = {SUPERVISOR: 0, SERVER: 1}
        rows = sorted(services.items(), key=lambda row: (order.get(row[0], 2), row))
        for pid in sorted(runs):
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid).ppid()
                if parent not in runs:
                    is_ours = parent in services.values()
                    rows.append(("run" if is_ours else "left by a dead worker", pid))
        return rows

    def programs(self) -> dict[int, str]:
        """Return process id → what `installed` was when it started; unknown of versions before."""
        programs = {}
        for process in self.processes().values():
            with suppress(psutil.Error):
                programs[process.pid] = process.environ().get(PROGRAM_VARIABLE, "unknown")
        return programs

    def start(self, settings: ServerSettings, service: str) -> subprocess.Popen[bytes]:
        """Start a service that survives the process that calls this."""
        file = self.logs / f"{service}.log"
        if file.exists() and file.stat().st_size > LARGEST_LOG:
            file.replace(file.with_suffix(".old.log"))
        with file.open("ab") as log:
            return subprocess.Popen(
                command(self, settings, service),
                cwd=self.path,
                env=environment(self, settings, service),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end_all(self) -> list[str]:
        """End workers, runs that a killed worker left behind, then the server; return the names.

        Raises:
            ServerFailed: a process cannot be ended.
        """
        by_name = self.processes()
        for prefix in (SUPERVISOR, "worker", "process", ""):
            self._end(prefix)
        return [name for name in by_name if not name.startswith("process")]

    def _end(self, prefix: str) -> None:
        """End all processes whose names start with a prefix: by SIGTERM, then by SIGKILL."""

        def left() -> list[psutil.Process]:
            return [p for name, p in self.processes().items() if name.startswith(prefix)]

        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in left():
                with suppress(psutil.NoSuchProcess):
                    end(process)
            if wait_until(lambda: not left(), STOP_SECONDS):
                return
        pids = ", ".join(str(process.pid) for process in left())
        raise ServerFailed(f"cannot end the processes {pids}; look at them with `ps`")

    def log_end(self, service: str) -> str:
        """Return the last lines of a service's log."""
        file = self.logs / f"{service}.log"
        lines = file.read_text(errors="replace").splitlines() if file.exists() else ["(nothing)"]
        return "\n".join(lines[-LOG_LINES:])

    @contextmanager
    def busy(self, say: Callable[[str], None]) -> Iterator[None]:
        """Create the home and lock it for the block; the kernel unlocks it when a process ends.

        Raises:
            ServerFailed: the home cannot be used.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
            with (self.path / "busy").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    say("waiting for another `exl2flow server up` or `down`")
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ServerFailed(
                f"cannot use `{error.filename or self.path}` ({error.strerror}); fix that, or "
                "use another `--home`"
            ) from error


def in_url(host: str) -> str:
    """Return a host as it stands in an URL: IPv6 addresses in brackets."""
    return f"[{host.replace('%', '%25')}]" if ":" in host else host


def installed() -> str:
    """Return the version of the installed program and when its newest file was written.

    A checkout changes without its version.
    """
    files = (file for name in PARTS for file in (PACKAGE / name).rglob("*.py"))
    newest = max(file.stat().st_mtime for file in files)
    return f"{version('exl2flow')} of {datetime.fromtimestamp(newest, UTC):%Y-%m-%d %H:%M:%S} UTC"


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True when the condition holds, False if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def telling(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say every few seconds what the block waits for."""
    started, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(TELL_SECONDS):
            say(f"waiting for {what} ({time.monotonic() - started:.0f} s so far)")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def command(home: Home, settings: ServerSettings, service: str) -> list[str]:
    """Return the command line of a service."""
    python = [sys.executable, "-P", "-m"]
    if service == SUPERVISOR:
        return [*python, f"{MODULES}services", str(home.path)]
    if service == SERVER:
        place = ["--host", settings.host, "--port", str(settings.port), "--log-level", "warning"]
        return [*python, "uvicorn", "--factory", f"{MODULES}application:create_app", *place]
    name = f"{os.uname().nodename}-{service}"
    limits = ["--pool", POOL, "--type", "process", "--limit", "1", "--name", name]
    return [*python, f"{MODULES}worker", "worker", "start", *limits]


def environment(home: Home, settings: ServerSettings, service: str) -> dict[str, str]:
    """Return the environment of a service; it keeps that of the user's shell."""
    variables = {
        HOME_VARIABLE: str(home.path),
        NAME_VARIABLE: service,
        PROGRAM_VARIABLE: installed(),
        "PREFECT_HOME": str(home.path / "prefect"),
        "PREFECT_API_URL": settings.api_url,
        "PREFECT_API_AUTH_STRING": settings.auth,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "DO_NOT_TRACK": "1",
    }
    if (gpu := settings.workers.get(service)) is not None:
        variables["CUDA_VISIBLE_DEVICES"] = gpu
    if service != SERVER:
        return {**os.environ, **variables}
    variables |= {**SERVER_ENVIRONMENT, "PREFECT_SERVER_API_AUTH_STRING": settings.auth}
    if settings.database is not None:
        variables[DATABASE_VARIABLE] = settings.database
    origins = f"{settings.url},http://localhost:{settings.port}"
    return {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins, **os.environ, **variables}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ServerFailed: another program has the port, or this machine has no such interface.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python repeats the address after it
        raise ServerFailed(
            f"cannot listen on `{in_url(host)}:{port}` ({reason}); choose another `--port`, or end "
            "the program that uses it"
        ) from error


def answers(url: str, seconds: float = 5.0) -> bool:
    """Return whether a Prefect API answers within that time; no proxy is used."""
    with suppress(OSError, HTTPException):
        build_opener(ProxyHandler({})).open(f"{url}/health", timeout=seconds).close()
        return True
    return False


def supervise(home: Home) -> None:
    """Start all services, and restart them; return only if the server ends before it answered."""
    settings = home.settings()
    services: dict[str, subprocess.Popen[bytes]] = {}
    started: dict[str, float] = {}
    while True:
        for name in (SERVER, *settings.workers) if answers(settings.api_url) else (SERVER,):
            if name in services and services[name].poll() is None:
                continue
            if name == SERVER and services.keys() == {SERVER}:
                return  # no worker was ever started, so the server never answered
            if time.monotonic() - started.get(name, -PAUSE_SECONDS) >= PAUSE_SECONDS:
                started[name] = time.monotonic()
                services[name] = home.start(settings, name)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    supervise(Home(Path(sys.argv[1])))
