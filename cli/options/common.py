"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from exl2flow.core.options.base import Option, Options

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of tables.")
]
NAMED = "Folder, or EXL2 model on the Hub: org/name:4.0."
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help=NAMED)]


class RunSwitches(Options):
    """Switches of a command that runs stages in this process."""

    restart: Annotated[bool, Option(panel="Running")] = Field(
        default=False,
        description="delete the checkpoints of this run, shared ones as well, and start over",
    )
    no_prefect: bool = True
    dry_run: Annotated[bool, Option(panel="Running")] = Field(
        default=False, description="check everything, print the plan or all problems, and stop"
    )
    as_json: Annotated[bool, Option(panel="Running", flag="json")] = Field(
        default=False, description="print one JSON object on stdout instead of tables"
    )


class FlowSwitches(RunSwitches):
    """Switches of a command that runs a Prefect flow, unless `--no-prefect` is given."""

    no_prefect: Annotated[bool, Option(panel="Running")] = Field(
        default=False,
        description="run the stages directly, not as a Prefect flow. By default the flow runs on "
        "the server of PREFECT_API_URL, or on a temporary one",
    )
