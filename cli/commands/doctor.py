"""`exl2flow doctor`: what this machine can do, and what to type for what it cannot."""

from pathlib import Path
from typing import Annotated

import typer

from exl2flow.cli.options import AsJson
from exl2flow.cli.output.console import emit_json
from exl2flow.cli.output.failures import FAILURE

EXAMPLES = (
    "exl2flow doctor",
    "exl2flow doctor --json > doctor.json   (for a bug report)",
)


def doctor(
    *,
    work_root: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for checkpoints, whose disk is looked at.")
    ] = Path(".exl2flow"),
    as_json: AsJson = False,
) -> None:
    """Show what this machine can do, what it cannot, and what to type for that.

    Look at the driver, torch, CuPy, every GPU, memory, disks, Prefect's server and the libraries of
    each extra. A kernel is compiled and run, and the rate of each GPU's memory is measured. The
    exit code is 1 if something that should work does not, such as CuPy beside a GPU with a driver.
    """
    from exl2flow.cli.work.doctor import examine, show_machine  # its probes import torch
    from exl2flow.cli.work.findings import findings, to_json

    machine = examine(work_root)
    if as_json:
        emit_json(to_json(machine))
    else:
        show_machine(machine)
    if not findings(machine).is_healthy:
        raise typer.Exit(FAILURE)
