"""The processes of a lasting server: who they are, what they are started with, what they left.

All lies in one folder, the home:

    server.json    what `exl2flow server up` was asked for; readable by its owner only
    services.json  the processes, as the supervisor last saw them
    lock           held by the supervisor while it runs
    busy           held by `up` and `down` while they are at work
    logs/          one file per process
    prefect/       Prefect's own home: database, results, leases
"""

import fcntl
import http.client
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from exl2flow.core.config import Options
from exl2flow.core.errors import ServerFailed

DATABASE_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
HOME = Path("~/.exl2flow")
POOL = "exl2flow"
SERVER, SUPERVISOR = "server", "supervisor"
HEARTBEAT_SECONDS = 30  # the least that Prefect allows
LOG_LINES = 15
EXCEPTION = re.compile(r"[\w.]+[eE]rror: .+")  # the last line of a traceback
HEALTH_TIMEOUT_SECONDS = 5.0
WORKER_STOP_SECONDS = 30.0
RUN_STOP_SECONDS = 10.0
SERVER_STOP_SECONDS = 10.0
BUSY_SECONDS = 600.0  # that another `up` or `down` may take
HOME_VARIABLE = "EXL2FLOW_SERVICE_OF"  # services have it in their environment, and so have runs
QUIET = {"DO_NOT_TRACK": "1"}
SERVER_ENVIRONMENT = {
    **QUIET,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "exl2flow.flows.server.ordering",
    # Leases in memory would be held for ever after the server was killed.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage"
    ".filesystem",
}


class ServerSettings(Options):
    """What a lasting server is started with."""

    host: str = Field("127.0.0.1", description="interface to listen on")
    port: int = Field(4200, ge=1, le=65535, description="port of API and UI")
    database: str | None = Field(None, description="SQLAlchemy URL; empty: SQLite in the home")
    gpus: tuple[str, ...] = Field((), description="one worker each; empty: one worker without")
    folder: Path = Field(description="where relative paths of deployments start")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process by its id and its start, as ids are used again; `exits` counts what preceded it."""

    pid: int
    begun: int
    exits: int = 0

    @classmethod
    def of(cls, pid: int, *, exits: int = 0) -> "Process":
        """Describe a running process."""
        return cls(pid=pid, begun=_begun(pid) or 0, exits=exits)

    def is_alive(self) -> bool:
        """Tell whether it still runs."""
        return _begun(self.pid) == self.begun

    def send(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def end(processes: Sequence[Process], seconds: float) -> None:
    """End processes together: by SIGTERM, by SIGKILL those that are left after that time."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.send(signum)
        wait_until(lambda: not any(process.is_alive() for process in processes), seconds)


def _begun(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _with_environment(entry: bytes) -> list[Process]:
    """Return the user's processes that have this entry in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(Process.of(int(folder.name)))
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True when the condition holds, False when it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Home:
    """The folder of a lasting server."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def command(self, verb: str) -> str:
        """Return the command line that does something with this home."""
        own = () if self.path == HOME.expanduser() else ("--home", str(self.path))
        return shlex.join(("exl2flow", "server", verb, *own))

    def settings(self) -> ServerSettings | None:
        """Return what the server was last started with, if it ever was.

        Raises:
            ServerFailed: the file is damaged.
        """
        file = self.path / "server.json"
        try:
            return ServerSettings.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ServerFailed(f"`{file}` is damaged ({error}); delete it") from error
        except OSError as error:
            raise ServerFailed(f"cannot read `{file}` ({error.strerror}); use `--home`") from error

    def save_settings(self, settings: ServerSettings) -> None:
        """Keep what the server is started with; the database's URL may hold a password."""
        self._write("server.json", settings.model_dump(mode="json"))

    def processes(self) -> dict[str, Process]:
        """Return service name → process, those that ended included."""
        try:
            content = json.loads((self.path / "services.json").read_bytes())
            return {name: Process(**fields) for name, fields in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):  # damaged: as if none had run
            return {}

    def alive(self) -> dict[str, Process]:
        """Return service name → process of those that run."""
        return {name: process for name, process in self.processes().items() if process.is_alive()}

    def save_processes(self, processes: Mapping[str, Process]) -> None:
        """Keep the processes."""
        content = {name: asdict(process) for name, process in processes.items()}
        self._write("services.json", content)

    def _write(self, name: str, content: object) -> None:
        draft = self.path / f".{name}.{os.getpid()}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                json.dump(content, file, indent=4)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path / name)
        finally:
            draft.unlink(missing_ok=True)

    def log(self, service: str) -> Path:
        """Return the log file of a service."""
        return self.path / "logs" / f"{service}.log"

    def last_lines(self, service: str) -> str:
        """Return the end of a service's log."""
        try:
            lines = self.log(service).read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return "\n".join(lines[-LOG_LINES:]) or "(nothing)"

    def reason(self, service: str) -> str:
        """Return the last exception in the end of a service's log, all of the end without one."""
        lines = self.last_lines(service)
        found = [line for line in lines.splitlines() if EXCEPTION.fullmatch(line)]
        return found[-1] if found else lines

    def end_services(self) -> None:
        """End workers, runs that a killed worker left behind, and the server at last."""
        processes = self.processes()
        apart = {p.pid for name, p in processes.items() if name in (SERVER, SUPERVISOR)}
        end([p for p in processes.values() if p.pid not in apart], WORKER_STOP_SECONDS)
        mark = f"{HOME_VARIABLE}={self.path}".encode()
        marked = [process for process in _with_environment(mark) if process.pid not in apart]
        end(marked, RUN_STOP_SECONDS)
        end([p for name, p in processes.items() if name == SERVER], SERVER_STOP_SECONDS)

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the home as its supervisor, if nobody else does."""
        handle = _lock_file(self.path / "lock")
        try:
            yield _is_locked(handle)
        finally:
            os.close(handle)

    @contextmanager
    def busy(self, say: Callable[[str], None]) -> Iterator[None]:
        """Make the home, and change it alone; wait for another one that does.

        Raises:
            ServerFailed: the home cannot be used, or the other one takes too long.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (owner := self.path.stat().st_uid) != os.getuid():
                raise ServerFailed(
                    f"`{self.path}` belongs to the user with number {owner}; use another `--home`"
                )
            (self.path / "logs").mkdir(exist_ok=True)
            with ExitStack() as stack:
                self._wait_for_others(stack, say)
                yield
        except OSError as error:
            raise ServerFailed(
                f"cannot use `{error.filename or self.path}` ({error.strerror}); mend that, or "
                "use another `--home`"
            ) from error

    def _wait_for_others(self, stack: ExitStack, say: Callable[[str], None]) -> None:
        """Have nobody else at work in the home until the stack is closed."""
        handle = _lock_file(self.path / "busy")
        stack.callback(os.close, handle)
        if _is_locked(handle):
            return
        say("waiting for another `exl2flow server up` or `down`")
        if not wait_until(lambda: _is_locked(handle), BUSY_SECONDS):
            raise ServerFailed(
                f"another `exl2flow server up` or `down` is at work in `{self.path}` for "
                f"{BUSY_SECONDS:.0f} s; end it first"
            )


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_locked(handle: int) -> bool:
    """Lock a file unless somebody else has; the kernel unlocks it when the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def command(settings: ServerSettings, service: str) -> list[str]:
    """Return the command line of a service."""
    python = [sys.executable, "-P", "-m"]
    if service == SERVER:
        app = "exl2flow.flows.server.application:create_app"
        place = ["--host", settings.host, "--port", str(settings.port)]
        return [*python, "uvicorn", "--factory", app, *place, "--log-level", "warning"]
    name = f"{os.uname().nodename}-{service}"
    limits = ["--pool", POOL, "--type", "process", "--limit", "1", "--name", name]
    return [*python, "exl2flow.flows.server.worker", "worker", "start", *limits]


def environment(home: Home, settings: ServerSettings, service: str) -> dict[str, str]:
    """Return the environment of a service; settings of the user's shell are kept."""
    common = {
        HOME_VARIABLE: str(home.path),
        "PREFECT_HOME": str(home.path / "prefect"),
        "PREFECT_API_URL": settings.api_url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
    }
    if service == SERVER:
        own = dict(SERVER_ENVIRONMENT)
        if settings.database is not None:
            own[DATABASE_VARIABLE] = settings.database
        return {"PREFECT_UI_API_URL": settings.api_url, **os.environ, **common, **own}
    gpu = settings.workers[service]
    device = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    return {**os.environ, **common, **QUIET, **device}


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ServerFailed: another program has the port, or the host is none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # Python repeats the address behind it
        raise ServerFailed(
            f"cannot listen on `{host}:{port}` ({reason}); choose another `--port`, or end "
            "the program that uses it"
        ) from error


def answers(settings: ServerSettings) -> bool:
    """Tell whether the server answers."""
    parts = urlsplit(settings.url)
    connection = http.client.HTTPConnection(
        str(parts.hostname), parts.port, timeout=HEALTH_TIMEOUT_SECONDS
    )
    try:
        connection.request("GET", "/api/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
