"""The systemd units of the documentation: valid, with commands and settings that exist."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import uvicorn
from prefect.cli._app import _app as prefect_app

from exl2flow.cli.main import app
from exl2flow.flows.cli.server import app as server_app
from exl2flow.flows.server.services import (
    HEARTBEAT_SECONDS,
    SERVER,
    SERVER_ENVIRONMENT,
    Home,
    ServerSettings,
    command,
)

FOLDER = Path(__file__).parents[4] / "docs" / "how-to" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAMS = "/srv/exl2flow/.venv/bin/"


def values(unit: Path, key: str) -> list[str]:
    """Return the values of a key of a unit."""
    lines = unit.read_text(encoding="utf-8").splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def settings(unit: str) -> dict[str, str]:
    """Return the environment that a unit sets."""
    words = shlex.split(" ".join(values(FOLDER / unit, "Environment")))
    return dict(word.split("=", 1) for word in words)


def commands(unit: Path) -> list[list[str]]:
    """Return the command lines of a unit for its instance 0 on the host `host`."""
    lines = [line for key in ("ExecStart", "ExecStop") for line in values(unit, key)]
    return [shlex.split(line.replace("%i", "0").replace("%H", "host")) for line in lines]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_hold_nothing_that_systemd_does_not_know(unit: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze, of Debian's package systemd")
    text = unit.read_text(encoding="utf-8")
    for name in ("exl2flow", "python", "uvicorn"):
        text = text.replace(f"{PROGRAMS}{name} ", f"{sys.executable} ")
    copy = tmp_path / unit.name.replace("@", "@0")
    copy.write_text(text)
    whose = ["--user"] if "default.target" in text else []

    done = subprocess.run(
        [program, *whose, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_commands_of_units_have_options_that_exist(unit: Path) -> None:
    found = commands(unit)

    assert found
    for program, *words in found:
        match program.removeprefix(PROGRAMS):
            case "python":
                assert words[:3] == ["-P", "-m", "exl2flow.flows.server.worker"]
                prefect_app.parse_args(words[3:], exit_on_error=False, print_error=False)
            case "uvicorn":
                uvicorn.main.make_context("uvicorn", words)
            case "exl2flow" if words[0] == "serve":
                typer.main.get_command(app).commands["serve"].make_context("serve", words[1:])  # type: ignore[attr-defined]
            case "exl2flow":
                area, verb, *options = words
                assert area == "server"
                group = typer.main.get_command(server_app)
                group.commands[verb].make_context(verb, options)  # type: ignore[attr-defined]
            case other:
                pytest.fail(f"{other} is none of our programs")


def test_system_units_run_as_the_user_who_converts() -> None:
    assert [values(unit, "User") for unit in UNITS if "multi-user" in unit.read_text()] == [
        ["exl2flow"],
        ["exl2flow"],
        ["exl2flow"],
    ]


def test_units_of_server_and_worker_do_as_our_own_services() -> None:
    ours = ServerSettings(folder=Path(), gpus=("0",))
    worker = command(Home(Path()), ours, "worker-gpu0")
    [server_unit] = commands(FOLDER / "exl2flow-server.service")
    [worker_unit] = commands(FOLDER / "exl2flow-worker@.service")

    origins = {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"{ours.url},http://localhost:{ours.port}"}
    assert settings("exl2flow-server.service") == SERVER_ENVIRONMENT | origins
    assert settings("exl2flow-worker@.service") == {
        "CUDA_VISIBLE_DEVICES": "%i",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS),
        "PREFECT_API_URL": ours.api_url,
        "DO_NOT_TRACK": "1",
    }
    assert worker_unit[1:-1] == worker[1:-1]  # but the worker's name
    server = command(Home(Path()), ours, SERVER)
    assert server_unit[1:] == server[server.index("uvicorn") + 1 :]
