"""`exl2flow server`: a lasting Prefect server with its workers."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from exl2flow.cli.options import AsJson
from exl2flow.cli.output.console import emit_json, say, show
from exl2flow.cli.output.failures import FAILURE
from exl2flow.cli.output.tables import plan_table
from exl2flow.core.errors import ConfigError
from exl2flow.flows.server.services import (
    DATABASE_VARIABLE,
    HOME,
    POOL,
    Home,
    ServerSettings,
    installed,
    telling,
)

# A small model that any machine can fetch
EXAMPLE = """'config={"source": "Qwen/Qwen3-0.6B", "out": "Qwen3-0.6B-exl2"}'"""
_whisper = partial(say, style="dim")
app = typer.Typer(
    no_args_is_help=True,
    help="Start, end or check a Prefect server, which runs conversions (`serve` answers prompts).",
)
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
        exists=True,
        file_okay=False,
        resolve_path=True,
        help="Where relative paths in runs start.",
        show_default="the current folder",
    ),
]


@app.command("up")
def up(
    *,
    home: HomeOption = HOME,
    host: Annotated[
        str | None, typer.Option(help="Interface to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of API and UI.", show_default="4200")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="One worker for each of these, as 0,1; 0+1: one worker with both, whose runs can "
            "use them together; none: one worker without a GPU.",
            show_default="all",
        ),
    ] = None,
    folder: FolderOption = None,
    sqlite: Annotated[
        bool, typer.Option("--sqlite", help="Go back to the database in the home.")
    ] = False,
) -> None:
    """Start a Prefect server and a worker per GPU in the background; create what is missing.

    Options that are not given are those of the last time. The database is SQLite in the home, or
    what PREFECT_SERVER_DATABASE_CONNECTION_URL names.
    """
    if sqlite and os.environ.get(DATABASE_VARIABLE):
        raise ConfigError(f"`--sqlite`: {DATABASE_VARIABLE} names another database; unset it")
    with telling(_whisper, "Prefect's libraries to load"):
        from exl2flow.flows.server import lasting

    place = Home(home)
    settings = _settings(place, {"host": host, "port": port, "folder": folder}, gpus, sqlite=sqlite)
    database = settings.database
    if database is not None and DATABASE_VARIABLE not in os.environ:
        _whisper(
            f"using {lasting.without_password(database)} as the last time; `--sqlite` goes back to "
            "the database in the home"
        )
    kept = lasting.up(place, settings, say=_whisper)
    say(
        f"the server is up: {settings.url}\n"
        f"  {place.command('password')}   (what the browser asks for)\n"
        f"  export PREFECT_API_URL={settings.api_url}\n"
        f"  export PREFECT_API_AUTH_STRING=$({place.command('password')})\n"
        f"  prefect deployment run convert/convert -p {EXAMPLE}\n"
        "      (or in the browser: Deployments)\n"
        f"  {place.command('status')}\n"
        f"  {place.command('down')}"
    )
    for text in (*kept, *_older(place)):
        say(text, style="yellow")


def _settings(
    place: Home, options: dict[str, Any], gpus: str | None, *, sqlite: bool
) -> ServerSettings:
    """Return what is given, else what holds since the last time.

    Raises:
        ConfigError: a value is wrong.
    """
    is_known = os.access(place.file, os.F_OK)
    options |= {
        "database": os.environ.get(DATABASE_VARIABLE) or None,
        "gpus": _gpus(gpus) if gpus is not None or not is_known else None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    before: dict[str, Any] = place.settings().model_dump() if is_known else {"folder": Path.cwd()}
    if sqlite:
        before["database"] = None
    try:
        return ServerSettings.model_validate({**before, **given})
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]  # the input may hold a password
        raise ConfigError(f"`{problem['loc'][0]}`: {problem['msg']}") from None


def _older(place: Home) -> list[str]:
    """Say whether running processes are of an older program than the installed one."""
    now, programs = installed(), place.programs()
    older = [name for name, pid in place.listed() if name != "run" and programs.get(pid) != now]
    if not older:
        return []
    return [
        f"{', '.join(older)}: running an older program than the installed one; "
        f"`{place.command('down')}`, then `{place.command('up')}` starts it"
    ]


def _gpus(text: str | None) -> tuple[str, ...]:
    """Return the GPUs that an option names, else all, by their names in CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: there are GPUs, but not these; runs on them would silently use the CPU. Or one
            is named twice.
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    present, chosen = (
        tuple(part.strip() for part in listed.split(",") if part.strip() not in ("", "none"))
        for listed in (visible, visible if text is None else text)
    )
    each = [gpu for gpus in chosen for gpu in gpus.split("+")]
    if len({*each}) < len(each):
        raise ConfigError(f"`--gpus {text}` names a GPU twice; each belongs to one worker")
    lacking = [g for g in each if g not in present and not g.startswith(("GPU-", "MIG-"))]
    if lacking and present:
        raise ConfigError(
            f"`--gpus`: no GPU `{lacking[0]}`; take some of {', '.join(present)}, or none"
        )
    if lacking:
        say(f"no GPU found: the workers of {', '.join(lacking)} will use the CPU", style="yellow")
    return chosen


@app.command("apply")
def apply(*, folder: FolderOption = None) -> None:
    """Create our work pool, deployments and automations on a server that you run yourself.

    Its address is read from PREFECT_API_URL, its password from PREFECT_API_AUTH_STRING.
    """
    from prefect.settings import PREFECT_API_URL

    from exl2flow.flows.server import lasting

    url = str(PREFECT_API_URL.value())
    if not url.startswith(("http://", "https://")):
        raise ConfigError("set PREFECT_API_URL to an address such as http://127.0.0.1:4200/api")
    kept = lasting.apply(folder or Path.cwd())
    say(f"applied to {url}")
    for text in kept:
        say(text, style="yellow")


@app.command("password")
def password(*, home: HomeOption = HOME) -> None:
    """Print the password of the server, for the browser and PREFECT_API_AUTH_STRING."""
    print(Home(home).settings().auth)


@app.command("down")
def down(*, home: HomeOption = HOME) -> None:
    """End workers and server; runs that are under way go on after the next `up`."""
    place = Home(home)
    ended: list[str] = []
    if os.access(place.file, os.F_OK):
        with place.busy(_whisper):
            ended = place.end_all()
    say(f"ended: {', '.join(ended)}" if ended else f"nothing ran in `{place.path}`")


@app.command("status")
def status(*, home: HomeOption = HOME, as_json: AsJson = False) -> None:
    """Show the processes and what is missing; exit code 0 if all is well, else 1."""
    from exl2flow.flows.server.lasting import problems, without_password

    place = Home(home)
    settings = place.settings()
    processes, programs, faults = place.listed(), place.programs(), problems(place, settings)
    if as_json:
        emit_json(
            {
                "healthy": not faults,
                "problems": faults,
                "url": settings.url,
                "api_url": settings.api_url,
                "database": settings.database and without_password(settings.database),
                "pool": POOL,
                "folder": str(settings.folder),
                "program": installed(),
                "processes": [
                    {"name": name, "pid": pid, "program": programs.get(pid)}
                    for name, pid in processes
                ],
            }
        )
    else:
        places = {"address": settings.url, "relative paths": settings.folder, "logs": place.logs}
        rows = [(name, str(where)) for name, where in places.items()]
        running = ((name, f"process {pid}, {programs.get(pid)}") for name, pid in processes)
        show(plan_table([*rows, ("installed", installed()), *running]))
        for text in _older(place):
            say(text, style="yellow")
        for problem in faults:
            say(f"problem: {problem}", style="red")
        if faults:
            say(f"`{place.command('up')}` creates and starts what is missing")
    if faults:
        raise typer.Exit(FAILURE)
