"""Switches that several commands share."""

from typing import Annotated

import typer

RUNNING = "Running"  # the panel of options for where and how a command runs

Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        metavar="",
        help="Delete the checkpoints of this run, shared ones as well, and start over.",
        rich_help_panel=RUNNING,
    ),
]
NoPrefect = Annotated[
    bool,
    typer.Option(
        "--no-prefect",
        metavar="",
        help="Run the stages directly, not as a Prefect flow. By default the flow runs on the "
        "server of PREFECT_API_URL, or on a temporary one.",
        rich_help_panel=RUNNING,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar="",
        help="Check everything, print the plan or all problems, and stop.",
        rich_help_panel=RUNNING,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print one JSON object on stdout instead of tables.",
        rich_help_panel=RUNNING,
    ),
]
