"""`exl2flow server`: a Prefect server that stays, its workers, what it holds."""

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.failures import FAILURE
from exl2flow.flows.cli.tables import plan_table
from exl2flow.flows.server.services import DATABASE_VARIABLE, HOME, Home, ServerSettings

if TYPE_CHECKING:
    from exl2flow.flows.server.lasting import Status

app = typer.Typer(no_args_is_help=True, help="Start, end or look at a Prefect server with workers.")
HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        metavar="DIR",
        envvar="EXL2FLOW_HOME",
        help="Folder of settings, logs and, without another database, all records of runs.",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Where relative paths in runs start.",
        show_default="the current folder",
    ),
]


@app.command("up")
def up(
    *,
    home: HomeOption = HOME,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Interface to listen on.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port of API and UI.", show_default="4200")
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            metavar="URL",
            envvar=DATABASE_VARIABLE,
            help="As postgresql+asyncpg://user:password@host:5432/name.",
            show_default="SQLite in the home",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="LIST",
            help="One worker for each of these, as 0,1; none: one worker without a GPU.",
            show_default="all",
        ),
    ] = None,
    folder: FolderOption = None,
) -> None:
    """Start a Prefect server and a worker per GPU in the background; mend what is missing.

    Options that are not given are those of the last time.
    """
    from exl2flow.flows.server import lasting

    place = Home(home)
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "database": database,
        "gpus": None if gpus is None else _checked(_gpus(gpus)),
        "folder": None if folder is None else folder.absolute(),
    }
    settings = _settings(place.settings(), given)
    _check_folder(settings.folder)
    lasting.up(place, settings, say=_whisper)
    say(
        f"the server is up: {settings.url}\n"
        f"  export PREFECT_API_URL={settings.api_url}\n"
        "  prefect deployment run convert/convert   (or in the browser: Deployments)\n"
        f"  {place.command('status')}\n"
        f"  {place.command('down')}"
    )


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"`--folder`: `{folder}` is no folder; create it, or name another")


def _whisper(text: str) -> None:
    say(text, style="dim")


def _settings(before: ServerSettings | None, given: dict[str, Any]) -> ServerSettings:
    chosen = {name: value for name, value in given.items() if value is not None}
    if before is None:
        defaults = {"folder": Path.cwd(), **({} if "gpus" in chosen else {"gpus": _all_gpus()})}
    else:
        defaults = before.model_dump()
    try:
        return ServerSettings.model_validate({**defaults, **chosen})
    except ValidationError as error:
        problems = [f"`--{item['loc'][0]}`: {item['msg']}" for item in error.errors()]
        raise ConfigError("; ".join(problems)) from error


def _gpus(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def _checked(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs; numbers that this machine lacks would have runs on the CPU, in silence.

    Raises:
        ConfigError: there are GPUs, but not these, or one is none of CUDA's names.
    """
    there = _num_gpus()
    lacking = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= there]
    strange = [gpu for gpu in gpus if not (gpu.isdecimal() or gpu.startswith(("GPU-", "MIG-")))]
    if strange or (there and lacking):
        raise ConfigError(
            f"`--gpus`: there is no GPU `{(strange + lacking)[0]}`; take numbers from 0 to "
            f"{max(there, 1) - 1}, or none"
        )
    if lacking:
        say(
            f"no GPU is found here: worker of {', '.join(lacking)} will use the CPU", style="yellow"
        )
    return gpus


def _num_gpus() -> int:
    """Return how many GPUs NVIDIA's driver knows; torch would tell as well, but loads for long."""
    count = ctypes.c_uint()
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    failed = driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return 0 if failed else count.value


def _all_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _gpus(visible)
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))


@app.command("apply")
def apply(
    *,
    api: Annotated[
        str,
        typer.Option(
            "--api",
            metavar="URL",
            envvar="PREFECT_API_URL",
            help="As http://127.0.0.1:4200/api.",
            show_default=False,
        ),
    ],
    folder: FolderOption = None,
) -> None:
    """Give a server that is run otherwise our work pool, deployments and automations."""
    from exl2flow.flows.server.provision import Provision

    place = (folder or Path.cwd()).absolute()
    _check_folder(place)
    if not api.startswith(("http://", "https://")):
        raise ConfigError(f"`--api`: `{api}` is no address such as http://127.0.0.1:4200/api")
    provision = Provision(api, place)
    provision.wait(say=_whisper)
    provision.apply()
    say(f"applied to {api}")


@app.command("down")
def down(*, home: HomeOption = HOME) -> None:
    """End workers and server; runs that are under way go on after the next `up`."""
    from exl2flow.flows.server import lasting

    place = Home(home)
    ended = lasting.down(place, say=_whisper)
    say(f"ended: {', '.join(ended)}" if ended else f"nothing ran in `{place.path}`")


@app.command("status")
def status(
    *,
    home: HomeOption = HOME,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Show processes, deployments and the last runs; exit code 0 if all is well, else 1."""
    from exl2flow.flows.server import lasting

    place = Home(home)
    found = lasting.status(place)
    if as_json:
        emit_json(found.to_json())
    else:
        _print(found, place)
    if found.problems:
        raise typer.Exit(FAILURE)


def _print(found: "Status", home: Home) -> None:
    settings = found.settings
    summary = [
        ("server", settings.url),
        ("database", settings.shown_database),
        ("relative paths", str(settings.folder)),
    ]
    show(plan_table(summary))
    table = _table("process", "state", "pid", "ended before", "log")
    for name, process in found.processes.items():
        state = "running" if process["running"] else "[red]not running[/red]"
        row = (process["pid"] or "", process["exits"], process["log"])
        table.add_row(name, state, *map(str, row))
    show(table)
    if found.deployments:
        table = _table("deployment", "schedule")
        for deployment in found.deployments:
            table.add_row(str(deployment["name"]), _schedules(deployment["schedules"]))
        show(table)
    if found.runs:
        table = _table("last runs", "state", "starts", "expected")
        for run in found.runs:
            table.add_row(*(str(run[key]) for key in ("name", "state", "starts", "expected")))
        show(table)
    for problem in found.problems:
        say(f"problem: {problem}", style="red")
    if found.problems:
        say(f"`{home.command('up')}` mends what is missing")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _schedules(schedules: Any) -> str:
    return ", ".join(
        f"{schedule['schedule']} ({'active' if schedule['active'] else 'inactive'})"
        for schedule in schedules
    )
