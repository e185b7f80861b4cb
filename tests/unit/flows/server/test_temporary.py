import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from exl2flow.core.errors import ServerFailed
from exl2flow.flows.server import temporary as server
from exl2flow.flows.server.temporary import TemporaryServer, api, check_home, end_reason

PARENT = """
import sys, time
from exl2flow.flows.server.temporary import TemporaryServer
server = TemporaryServer()
print(server._process.pid, flush=True)
time.sleep(60)
"""


def test_configured_api_is_used_and_no_server_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TemporaryServer", None)

    with temporary_settings({PREFECT_API_URL: "http://example.test/api"}), api() as link:
        assert not link.is_temporary
        assert link.ui_url == "http://example.test"


def test_configured_api_that_does_not_answer_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"

    with (
        temporary_settings({PREFECT_API_URL: url}),
        api() as link,
        pytest.raises(ServerFailed, match="no Prefect API answers at `http://127"),
    ):
        link.wait()


def test_server_that_does_not_start_is_reported_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "home.db"
    url = f"sqlite+aiosqlite:///{missing}?mode=ro"
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", url)
    temporary = TemporaryServer()

    with pytest.raises(ServerFailed, match="did not start"):
        temporary.wait()

    temporary.stop()
    assert temporary._process.poll() is not None


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "no output"),
        ("first\nlast\n", "last"),
        (
            "OSError: no space left\n"
            "/lib/prefect/context.py:1113: UserWarning: Failed to create /home/x\n"
            "  GLOBAL_SETTINGS_CONTEXT: SettingsContext = root_settings_context()\n",
            "OSError: no space left",
        ),
        (
            "Traceback (most recent call last):\n"
            '  File "a.py", line 1, in <module>\n    import b\n'
            "sqlite3.OperationalError: unable to open database file\n"
            "(Background on this error at: https://sqlalche.me/e/20/e3q8)\n",
            "sqlite3.OperationalError: unable to open database file",
        ),
    ],
)
def test_reason_of_an_end_is_its_error_and_no_line_of_source(log: str, reason: str) -> None:
    assert end_reason(log) == reason


def test_home_that_prefect_cannot_make_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "prefect"

    with pytest.raises(ServerFailed, match=f"its home `{home}` .*set PREFECT_HOME"):
        check_home(home)
    check_home(tmp_path / "new" / "prefect")


def test_server_ends_with_the_process_that_started_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    deadline = time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_server_takes_a_free_port_of_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = TemporaryServer()
    host, port = temporary.ui_url.removeprefix("http://").split(":")

    with socket.create_connection((host, int(port)), timeout=5):
        assert host == "127.0.0.1"

    temporary.stop()
