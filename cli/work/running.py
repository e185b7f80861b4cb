"""Begins the run of a command, on a Prefect server or without one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from exl2flow.cli.options import RunSwitches
from exl2flow.cli.output.console import say
from exl2flow.cli.output.extras import how_to_install
from exl2flow.core.options.config import RunOptions


def run_command(name: str, config: RunOptions, switches: RunSwitches) -> None:
    """Check a run, carry it out and print it; see `execute`."""
    alone = switches.no_prefect or switches.dry_run
    if not alone and find_spec("prefect") is None:
        say(f"running as with `--no-prefect`: {how_to_install('prefect')}", style="dim")
        alone = True
    with nullcontext() if alone else _on_server(name) as flow:
        from exl2flow.cli.work.execution import execute  # imports torch

        execute(name, config, flow, switches)


def _on_server(name: str) -> AbstractContextManager[Callable[[Any], Any]]:
    """Return what yields a flow with its server; flows import us, so they plug in by name."""
    context: AbstractContextManager[Callable[[Any], Any]]
    context = import_module("exl2flow.flows.cli.running").on_server(name)
    return context
