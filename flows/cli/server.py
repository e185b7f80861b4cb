"""`exl2flow server`: a lasting Prefect server with its workers."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from exl2flow.core.errors import ConfigError
from exl2flow.flows.cli.console import emit_json, say, show
from exl2flow.flows.cli.failures import FAILURE
from exl2flow.flows.cli.tables import plan_table
from exl2flow.flows.server.services import DATABASE_VARIABLE, HOME, Home, ServerSettings

app = typer.Typer(no_args_is_help=True, help="Start, end or check a Prefect server with workers.")
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
    """Start a Prefect server and a worker per GPU in the background; create what is missing.

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
        f"  {place.command('password')}   (what the browser asks for)\n"
        f"  export PREFECT_API_URL={settings.api_url}\n"
        f"  export PREFECT_API_AUTH_STRING=$({place.command('password')})\n"
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
        problems = [
            f"`--{item['loc'][0]}`: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_input=False)
        ]
        raise ConfigError("; ".join(problems)) from None  # which has the database's password


def _gpus(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(part.strip() for part in text.split(",") if part.strip())


def _checked(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs; runs on a number that does not exist would silently use the CPU.

    Raises:
        ConfigError: there are GPUs, but not these.
    """
    there = _all_gpus()
    lacking = [g for g in gpus if g not in there and not g.startswith(("GPU-", "MIG-"))]
    if lacking and there:
        raise ConfigError(
            f"`--gpus`: there is no GPU `{lacking[0]}`; take some of {', '.join(there)}, or none"
        )
    if lacking:
        say(f"no GPU found: the workers of {', '.join(lacking)} will use the CPU", style="yellow")
    return gpus


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
    """Create our work pool, deployments and automations on a server that is run otherwise.

    Its password is read from PREFECT_API_AUTH_STRING.
    """
    place = (folder or Path.cwd()).absolute()
    _check_folder(place)
    if not api.startswith(("http://", "https://")):
        raise ConfigError(f"`--api`: `{api}` is no address such as http://127.0.0.1:4200/api")
    from prefect.settings import PREFECT_API_AUTH_STRING

    from exl2flow.flows.server.provision import Provision

    provision = Provision(api, place, auth=PREFECT_API_AUTH_STRING.value())
    provision.wait(say=_whisper)
    provision.apply()
    say(f"applied to {api}")


@app.command("password")
def password(*, home: HomeOption = HOME) -> None:
    """Print the password of the server, for the browser and PREFECT_API_AUTH_STRING."""
    print(Home(home).started().auth)


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
    """Show the processes and what is missing; exit code 0 if all is well, else 1."""
    from exl2flow.flows.server import lasting

    place = Home(home)
    found = lasting.status(place)
    if as_json:
        emit_json(found)
    else:
        _print(found)
        if not found["healthy"]:
            say(f"`{place.command('up')}` creates and starts what is missing")
    if not found["healthy"]:
        raise typer.Exit(FAILURE)


def _print(found: dict[str, Any]) -> None:
    rows = [("server", found["url"]), ("database", found["database"])]
    rows.append(("relative paths", found["folder"]))
    for name, process in found["processes"].items():
        rows.append((name, f"process {process['pid'] or '–'}, log {process['log']}"))
    show(plan_table(rows))
    for problem in found["problems"]:
        say(f"problem: {problem}", style="red")
