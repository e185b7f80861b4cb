"""The processes of a lasting server: how they are started, found and ended.

Everything lies in one folder, the home:

    server.json  options and password of `exl2flow server up`; only its owner can read it
    deployed     the version of the deployments that were applied last
    busy         locked by `up` and `down` while they work
    logs/        one file per process
    prefect/     Prefect's own home: database, results, leases

A process belongs to a home if its environment says so; runs inherit that from their worker.
"""

import fcntl
import http.client
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import Field, ValidationError, field_validator

from exl2flow.core.config import Options
from exl2flow.core.errors import ServerFailed

DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
DATABASES = ("postgresql+asyncpg://user:password@host:5432/name", "sqlite+aiosqlite:////path")
HOME = Path("~/.exl2flow")
POOL = "exl2flow"
SERVER, SUPERVISOR = "server", "supervisor"
HEARTBEAT_SECONDS = 30  # the shortest interval that Prefect allows
LOG_LINES = 15
LARGEST_LOG = 20 * 2**20  # bytes; a larger one is set aside when its process starts
HEALTH_TIMEOUT_SECONDS = 5.0
WORKER_STOP_SECONDS = 30.0
STOP_SECONDS = 10.0  # for any other process
BUSY_SECONDS = 600.0  # for another `up` or `down`
HOME_VARIABLE, NAME_VARIABLE = "EXL2FLOW_SERVICE_OF", "EXL2FLOW_SERVICE"
MODULES = "exl2flow.flows.server."
SERVER_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": f"{MODULES}ordering",
    # Leases in memory would be held for ever after the server was killed.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage"
    ".filesystem",
}


class ServerSettings(Options):
    """Options of a lasting server, and its password."""

    host: str = Field("127.0.0.1", description="interface to listen on")
    port: int = Field(4200, ge=1, le=65535, description="port of API and UI")
    database: str | None = Field(None, description="SQLAlchemy URL; empty: SQLite in the home")
    gpus: tuple[str, ...] = Field((), description="one worker each; empty: one worker without")
    folder: Path = Field(description="where relative paths of deployments start")
    auth: str = Field(
        default_factory=lambda: f"exl2flow:{secrets.token_urlsafe(24)}",
        description="user:password of the API",
        repr=False,
    )

    @field_validator("database")
    @classmethod
    def _is_supported(cls, url: str | None) -> str | None:
        from sqlalchemy.engine import make_url  # slow to load, and rarely needed

        try:
            kind = "" if url is None else make_url(url).drivername
        except Exception:  # its message may have the password
            kind = "unknown"
        if kind and not any(form.startswith(f"{kind}:") for form in DATABASES):
            raise ValueError(f"must be like {' or '.join(f'`{form}`' for form in DATABASES)}")
        return url

    @property
    def url(self) -> str:
        """Address for programs and browsers on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    @property
    def api_url(self) -> str:
        """Value of PREFECT_API_URL."""
        return f"{self.url}/api"

    @property
    def workers(self) -> dict[str, str | None]:
        """Service name → CUDA_VISIBLE_DEVICES of each worker."""
        return {f"worker-gpu{gpu}": gpu for gpu in self.gpus} or {"worker": None}

    @property
    def shown_database(self) -> str:
        """The database without its password."""
        if self.database is None:
            return "SQLite"
        kind, _, rest = self.database.partition("://")
        return f"{kind}://{rest.rpartition('@')[2].partition('?')[0]}"


class Home:
    """The folder of a lasting server, and its processes."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def command(self, verb: str) -> str:
        """Return the command line for this home."""
        own = () if self.path == HOME.expanduser() else ("--home", str(self.path))
        return shlex.join(("exl2flow", "server", verb, *own))

    def settings(self) -> ServerSettings | None:
        """Return what the server was last started with, None if it never was.

        Raises:
            ServerFailed: the file is damaged.
        """
        file = self.path / "server.json"
        try:
            return ServerSettings.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ServerFailed(f"`{file}` is damaged; delete it, then repeat `up`") from error
        except OSError as error:
            raise ServerFailed(f"cannot read `{file}` ({error.strerror}); use `--home`") from error

    def started(self) -> ServerSettings:
        """Return the settings.

        Raises:
            ServerFailed: no server was ever started here.
        """
        if (settings := self.settings()) is None:
            raise ServerFailed(
                f"no server was started in `{self.path}`; `{self.command('up')}` starts one"
            )
        return settings

    def save_settings(self, settings: ServerSettings) -> None:
        """Keep the settings; they hold the password, perhaps that of the database as well."""
        draft = self.path / ".server.json"
        draft.unlink(missing_ok=True)
        with open(draft, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(settings.model_dump_json(indent=4))
        draft.replace(self.path / "server.json")

    def processes(self) -> dict[str, psutil.Process]:
        """Return service name → process; runs are named after their process."""
        found = {}
        for process in psutil.process_iter(["environ", "cmdline"]):
            environment = process.info["environ"] or {}
            if environment.get(HOME_VARIABLE) == str(self.path):
                is_service = any(MODULES in word for word in process.info["cmdline"] or ())
                name = environment.get(NAME_VARIABLE) if is_service else None
                found[name or f"process {process.pid}"] = process
        return found

    def start(self, settings: ServerSettings, service: str) -> psutil.Popen:
        """Start a service that survives the process that calls this."""
        file = self.log(service)
        if file.exists() and file.stat().st_size > LARGEST_LOG:
            file.replace(file.with_suffix(".old.log"))
        with file.open("ab") as log:
            return psutil.Popen(
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
        found = self.processes()
        _end([found[name] for name in found if name == SUPERVISOR], STOP_SECONDS)
        _end([found[name] for name in found if name.startswith("worker")], WORKER_STOP_SECONDS)
        left = self.processes()
        _end([left[name] for name in left if name != SERVER], STOP_SECONDS)
        _end(list(self.processes().values()), STOP_SECONDS)
        return [name for name in found if not name.startswith("process")]

    def log(self, service: str) -> Path:
        """Return the log file of a service."""
        return self.path / "logs" / f"{service}.log"

    def reason(self, service: str) -> str:
        """Return the last exception in the end of a service's log, or all of the end."""
        try:
            lines = self.log(service).read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        except FileNotFoundError:
            lines = []
        found = [line for line in lines if re.fullmatch(r"[\w.]+[eE]rror: .+", line)]
        return "\n".join(found[-1:] or lines) or "(nothing)"

    @contextmanager
    def busy(self, say: Callable[[str], None]) -> Iterator[None]:
        """Create the home and lock it for the block; wait for another process that holds it.

        Raises:
            ServerFailed: the home cannot be used, or the other process takes too long.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (owner := self.path.stat().st_uid) != os.getuid():
                raise ServerFailed(
                    f"`{self.path}` belongs to the user with number {owner}; use another `--home`"
                )
            (self.path / "logs").mkdir(exist_ok=True)
            with (self.path / "busy").open("a") as file:
                if not _is_locked(file.fileno()):
                    say("waiting for another `exl2flow server up` or `down`")
                    if not wait_until(lambda: _is_locked(file.fileno()), BUSY_SECONDS):
                        raise ServerFailed(
                            f"another `exl2flow server up` or `down` has been at work in "
                            f"`{self.path}` for {BUSY_SECONDS:.0f} s; end it first"
                        )
                yield
        except OSError as error:
            raise ServerFailed(
                f"cannot use `{error.filename or self.path}` ({error.strerror}); fix that, or "
                "use another `--home`"
            ) from error


def _is_locked(handle: int) -> bool:
    """Lock a file unless another process has; the kernel unlocks it when the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    if isinstance(process, psutil.Popen):
        process.poll()  # reaps a child
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _end(processes: Sequence[psutil.Process], seconds: float) -> None:
    """End processes together: by SIGTERM, then by SIGKILL those left after that time."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        if wait_until(lambda: not any(map(is_alive, processes)), seconds):
            return
    left = ", ".join(str(process.pid) for process in processes if is_alive(process))
    raise ServerFailed(f"cannot end the processes {left}; look at them with `ps`")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True when the condition holds, False if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def command(home: Home, settings: ServerSettings, service: str) -> list[str]:
    """Return the command line of a service."""
    python = [sys.executable, "-P", "-m"]
    if service == SUPERVISOR:
        return [*python, f"{MODULES}supervisor", str(home.path)]
    if service == SERVER:
        place = ["--host", settings.host, "--port", str(settings.port), "--log-level", "warning"]
        return [*python, "uvicorn", "--factory", f"{MODULES}application:create_app", *place]
    name = f"{os.uname().nodename}-{service}"
    limits = ["--pool", POOL, "--type", "process", "--limit", "1", "--name", name]
    return [*python, f"{MODULES}worker", "worker", "start", *limits]


def environment(home: Home, settings: ServerSettings, service: str) -> dict[str, str]:
    """Return the environment of a service; it keeps that of the user's shell."""
    own = {
        HOME_VARIABLE: str(home.path),
        NAME_VARIABLE: service,
        "PREFECT_HOME": str(home.path / "prefect"),
        "PREFECT_API_URL": settings.api_url,
        "PREFECT_API_AUTH_STRING": settings.auth,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "DO_NOT_TRACK": "1",
    }
    if service == SERVER:
        own |= {**SERVER_ENVIRONMENT, "PREFECT_SERVER_API_AUTH_STRING": settings.auth}
        if settings.database is not None:
            own[DATABASE_VARIABLE] = settings.database
        origins = f"{settings.url},http://localhost:{settings.port}"
        pages = {"PREFECT_UI_API_URL": settings.api_url}
        return {**pages, "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins, **os.environ, **own}
    if (gpu := settings.workers.get(service)) is not None:
        own["CUDA_VISIBLE_DEVICES"] = gpu
    return {**os.environ, **own}


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
            f"cannot listen on `{host}:{port}` ({reason}); choose another `--port`, or end "
            "the program that uses it"
        ) from error


def health(url: str, seconds: float = HEALTH_TIMEOUT_SECONDS) -> object:
    """Return the status with which a server answers, or the error if it does not."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=seconds)
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return error
    finally:
        connection.close()


def answers(settings: ServerSettings) -> bool:
    """Return whether the server answers."""
    return health(settings.url) == http.client.OK
