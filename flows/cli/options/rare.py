"""`--help-all`: help that also lists the options that few people need."""

import inspect
from typing import Annotated

import typer

FLAG = "--help-all"


def _show(context: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    for parameter in context.command.params:
        parameter.hidden = False  # type: ignore[attr-defined]  # arguments and options have it
    typer.echo(context.get_help(), nl=False, color=context.color)
    raise typer.Exit


def help_all() -> inspect.Parameter:
    """Return the parameter `help_all` for the signature of a command."""
    option = typer.Option(
        FLAG,
        callback=_show,
        is_eager=True,
        metavar="",
        help="Show every option, the rare ones too, and exit.",
    )
    return inspect.Parameter(
        "help_all",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[bool, option],
        default=False,
    )
